"""Figures that systems have published, beside what Counterpoint's own programs, planner and simulator say of them."""
