"""Random programs on the recorder, against eager: state, aliases, complex tensors, partial losses,
hooks, threads.

PACKGRAPH_FUZZ_COUNT programs (2,000) from seed PACKGRAPH_FUZZ_SEED (0) on. A failure shows the
seed, what differs and the smallest program that still fails, which runs with the names of
`corpus/programs.py`. `make test` runs the first 50.
"""

import os
from collections import Counter

import pytest
from corpus.facts import BITWISE, SILENT
from corpus.programs import Line, Program, generate, judged, smaller

FIRST, COUNT = (
    int(os.environ.get(f"PACKGRAPH_FUZZ_{name}", value))
    for name, value in (("SEED", 0), ("COUNT", 2000))
)
CHUNK, QUICK = 50, 100
# The warning comes when a module goes; that nothing replays is judged before.
pytestmark = pytest.mark.filterwarnings("ignore:.*none of its calls was replayed")


def chunks():
    for start in range(FIRST, FIRST + COUNT, CHUNK):
        more = [pytest.mark.slow] if start >= FIRST + QUICK else []
        yield pytest.param(start, marks=more, id=str(start))


@pytest.mark.parametrize("start", list(chunks()))
@pytest.mark.few(2)
def test_programs_never_differ_silently(start):
    programs = [generate(seed) for seed in range(start, min(start + CHUNK, FIRST + COUNT))]
    verdicts = [judged(program) for program in programs]
    kinds = Counter(verdict.kind for verdict in verdicts)
    wrong = [
        (program, verdict)
        for program, verdict in zip(programs, verdicts, strict=True)
        if not verdict.good
    ]
    if wrong:
        program, verdict = wrong[0]
        small = smaller(program, verdict.kind)
        seeds = ", ".join(f"{program.seed} ({verdict.kind})" for program, verdict in wrong)
        pytest.fail(
            f"seeds {seeds}; the first one is {judged(small).what}\n{small.text}", pytrace=False
        )
    assert kinds[BITWISE] > len(programs) / 4, (
        f"too few programs replay for this to say anything: {kinds}"
    )


def test_a_wrong_program_is_found_and_made_small():
    """A loop that asks whether the module is graphed differs, and everything else can go."""
    program = generate(0)
    odd = "m.weight.data.mul_(2.0 if hasattr(m, 'stats') else 1.0)"
    wrong = Program(0, (Line("v1", "self.one(v0)", "v0"),), ("v1",), (*program.loop, odd, "done()"))
    assert judged(wrong).kind == SILENT
    assert smaller(wrong, SILENT).loop == (odd, "done()")
