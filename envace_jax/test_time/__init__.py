"""Private rehearsals before one committed run."""
