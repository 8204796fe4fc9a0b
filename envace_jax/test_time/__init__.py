"""Rehearsal at test time: private rehearsals, what is learnt from them, one committed run."""
