"""A plan before it runs: print its program, damage it, and see which law notices.

Nothing here needs torch: a program is text, and sixty-four ranks cost nothing.
"""

import counterpoint as cp
from counterpoint.simulator.cost_model import unit_costs


def main() -> str:
    """Print the rows of a small plan, and return what the laws say when one of its messages is lost."""
    compiled = cp.compile(cp.Plan.parse("pipeline(2) * data(2)", num_microbatches=2), cp.linear_chain(2))
    text = cp.format_program(compiled.program)
    print(text)

    damaged = cp.parse_program(text.replace("x1.1>1 ", "", 1))
    try:
        cp.simulate(damaged, unit_costs())
    except cp.ProgramError as error:
        print(f"\nwithout one of its messages: {error}")
        return str(error)
    raise AssertionError("a lost message was not noticed")


if __name__ == "__main__":
    main()
