"""Batch norm under a plan: statistics shared between replicas, and updated once per mini-batch."""
