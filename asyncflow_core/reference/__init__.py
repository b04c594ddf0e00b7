"""Small, exact implementations of every contract, in numpy: for tests, demos and comparison."""
