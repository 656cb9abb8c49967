"""One rank: leaves the plan open, as a user does who writes ``auto``, and prints as JSON which one is taken.

Then it takes turns with this plan and others, see ranks.py: the processes that have chosen are those that train.

Called with the model, how many plans are tried beside data parallelism, the files of a cluster and of a timing, and
what ranks.py is told, whose plans are those beside the chosen ones.
"""

import json
import sys
from pathlib import Path

from cells import SUBJECTS
from ranks import taken

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.model.timing_file import load_timing
from counterpoint.planner.choose import pick
from counterpoint.profiler.watch import as_in_training


def main(letter, measure, cluster, timing, text):
    asked, subject = json.loads(text), SUBJECTS[letter]()
    open_choice = {"strategy": "auto", "measure": int(measure), "cluster": cluster, "timing": load_timing(Path(timing))}
    with as_in_training(threads=1):
        with cp.parallelize(subject.build(), subject.optimizer, subject.loss, **open_choice) as run:
            run(*next(subject.batches(subject.batch)))
        told = said(run.team.choice)
        sys.stdout.write(f"{json.dumps(told)}\n")
        for cell in ([letter, *told["taken"]], [letter, *told["foreseen"]]):
            if cell not in asked["cells"]:
                asked["cells"].append(cell)
        taken(asked)


def said(choice):
    """Return what is told of a choice."""
    foreseen = pick(choice.ranking, choice.simplest, choice.question).plan
    return {
        "rank": detect().rank,
        "taken": written(choice.plan),
        "foreseen": written(foreseen),
        "trials": [[*written(trial.plan), trial.step_s, trial.turns] for trial in choice.trials],
        "untried": [[str(one.plan), one.reason] for one in choice.untried],
    }


def written(plan):
    """Return a plan as a cell has it."""
    return [str(plan), plan.num_microbatches]


if __name__ == "__main__":
    main(*sys.argv[1:])
