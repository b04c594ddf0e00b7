"""What works on rows: the one loop, and what each kind of worker does with a lease."""
