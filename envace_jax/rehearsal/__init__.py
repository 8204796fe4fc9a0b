"""ACT and REHEARSE: prompts, ledgers, the episode state machine, rollouts."""
