"""The one table of cases: the arguments with which every test calls the ops.

A case has shapes as letters (T tokens, E experts, K experts per token, H hidden, I inner, G = 2I, N rows, U scalars;
those of rope and attention are in arguments.py), its optional arguments, options and dtypes.

`CASES` contains named cases (real routers and blocks, other projects' tests, hostile inputs), the pairwise grids, and
small samples of each op and of each weight format with all optional arguments: the slower tests run the samples too.
Each group of ops has a file.
"""

from cases.attention import attention_cases
from cases.case import BFLOAT, FLOAT, HALF, OPTIONAL, Case
from cases.experts import experts_cases
from cases.linear_attention import linear_attention_cases
from cases.oracle import Args, call, expected
from cases.packed import packed_cases
from cases.rope import rope_cases
from cases.routers import router_cases
from cases.rows import row_cases
from cases.samples import samples

__all__ = ["BFLOAT", "CASES", "FLOAT", "HALF", "OPTIONAL", "SAMPLES", "Args", "Case", "call", "expected"]


def table() -> list[Case]:
    cases = samples() + router_cases() + experts_cases() + packed_cases()
    cases += row_cases() + rope_cases() + attention_cases() + linear_attention_cases()
    return list({str(case): case for case in cases}.values())


CASES = table()
SAMPLES = [case for case in CASES if case.sample]
