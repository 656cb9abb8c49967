"""What a machine and a model take: seconds, bytes and rates, measured where it runs or counted without running."""
