"""A plan before it runs: print its program, damage it, and see which verifier rule reports it.

Nothing here needs torch: a program is text, even for sixty-four ranks.
"""

import counterpoint as cp
from counterpoint.simulator.cost_model import unit_costs


def main() -> str:
    """Print the program of a small plan, and return the verifier's error after one of its messages is removed."""
    compiled = cp.compile(cp.Plan.parse("pipeline(2) * data(2)", num_microbatches=2), cp.linear_chain(2))
    text = cp.format_program(compiled.program)
    print(text)

    damaged = cp.parse_program(text.replace("x1.1>1 ", "", 1))
    try:
        cp.simulate(damaged, unit_costs())
    except cp.ProgramError as error:
        print(f"\nwithout one of its messages: {error}")
        return str(error)
    raise AssertionError("a missing message was not reported")


if __name__ == "__main__":
    main()
