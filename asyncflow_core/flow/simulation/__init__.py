"""What a run would take: its services' times, a simulation of its workflow, a search. No I/O."""
