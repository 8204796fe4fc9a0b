"""The study of the arms at the service desk: seven arms from one initial policy, final evaluation in the real world.

    python -m envace_jax study configs/studies/arms_quickstart.py --out runs/arms

Three seeds an arm, eight of the two whose difference is asked for (`envace`, `single_baseline`). A run that is there is
not made again, an interrupted one goes on from its checkpoint. Writes docs/studies/arms.md and its two plots.

Hardware: 2 CPU cores, 4 GB of memory, 4 hours.
Expect: docs/studies/arms.md.
"""

from envace_jax.evaluation.arm_study import ArmStudy


def get_study():
    return ArmStudy(
        arms={
            "envace": 8,
            "single_baseline": 8,
            "per_role": 3,
            "frozen_rehearse": 3,
            "recorded": 3,
            "real_env": 3,
            "act_only_endpoint": 3,
        },
        configs="configs/arms/{arm}.py",
        simulator="configs/quickstart.py",  # act_only_endpoint: the initial policy behind `serve`
        tasks=1000,
        fidelity_tasks=200,
        page="docs/studies/arms.md",
    )
