"""One rank: lets ``strategy="auto"`` choose a plan, prints the choice as JSON, and measures plans, see ranks.py.

The processes that chose the plan also measure it, since they would train. Arguments: the model, the number of measured
plans, the files of a cluster and a profile, and the request for ranks.py.
"""

import json
import sys
from pathlib import Path

from cells import WORKLOADS
from ranks import run_turns

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.model.model_profile import load_profile
from counterpoint.planner.choose import select_plan
from counterpoint.profiler.timer import training_conditions


def main(letter, measure, cluster, timing, text):
    asked, subject = json.loads(text), WORKLOADS[letter]()
    open_choice = {
        "strategy": "auto",
        "num_measured_plans": int(measure),
        "cluster": cluster,
        "profile": load_profile(Path(timing)),
    }
    with training_conditions(threads=1):
        with cp.parallelize(subject.build(), subject.optimizer, subject.loss, **open_choice) as run:
            run(*next(subject.batches(subject.batch)))
        told = describe_choice(run.local_ranks.choice)
        sys.stdout.write(f"{json.dumps(told)}\n")
        for cell in ([letter, *told["taken"]], [letter, *told["foreseen"]]):
            if cell not in asked["cells"]:
                asked["cells"].append(cell)
        run_turns(asked)


def describe_choice(choice):
    """Return a choice as JSON values."""
    foreseen = select_plan(choice.ranking, choice.by_simplicity, choice.problem).plan
    return {
        "rank": detect().rank,
        "taken": to_cell(choice.plan),
        "foreseen": to_cell(foreseen),
        "trials": [[*to_cell(trial.plan), trial.step_s, trial.round_times_s] for trial in choice.trials],
        "untried": [[str(one.plan), one.reason] for one in choice.failed_trials],
    }


def to_cell(plan):
    """Return a plan as in a cell."""
    return [str(plan), plan.num_microbatches]


if __name__ == "__main__":
    main(*sys.argv[1:])
