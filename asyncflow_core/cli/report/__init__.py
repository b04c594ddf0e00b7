"""`asyncflow report`: what happened in a run, from what it left."""
