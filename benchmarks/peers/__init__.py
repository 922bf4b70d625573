"""What other tools reach on the same problem, written as their own tutorials would have it."""
