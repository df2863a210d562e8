"""What code reads by names in strings, told from its instructions."""

import pytest

from packgraph.graphs.checks.code_reads import OWN_NAME, by_string

# Of an expression of `m`: the fields of what it reads that are not empty.
READS = {
    "globals()['A']": {"names": {"A"}},
    "globals().get('A', m.x)": {"names": {"A"}},
    "'A' in globals()": {"names": {"A"}},
    "m in globals()": {"own": {""}},
    "globals()['A' + m]": {"own": {"A"}},
    "globals()[f'A_{m}']": {"own": {"A_"}},
    "globals()['A_{}'.format(m)]": {"own": {""}},
    "[f(m) for f in (globals,)]": {"own": {""}},
    "eval('A + 1')": {"sources": {"A + 1"}},
    "eval('A', globals(), dict(x=m))": {"sources": {"A"}},
    "eval('A' + m(1))": {"anything": True},
    "exec(m)": {"anything": True},
    "getattr(cfg, 'x', m(1))": {},
    "getattr(m, 'x', []), getattr(m, 'x', {}), m.modules(), vars(m)[m], vars()[m]": {},
    "getattr(cfg.a, f'x_{m}', None)": {"computed": {(("cfg", "a"), "x_")}},
    "getattr(cfg, 'a' if m else 'b')": {"computed": {(("cfg",), "")}},
    "getattr(m, 'x' + str(m))": {"computed": {((), "x")}},
    "vars(cfg)['x'], cfg.__dict__['x'], cfg.__dict__.get('x', m)": {},
    "vars(cfg)[m], cfg.a.__dict__.get(m)": {"computed": {(("cfg",), ""), (("cfg", "a"), "")}},
    "sys.modules['a.b'], importlib.import_module('.d', m), __import__('c')": {
        "imports": {(0, "a.b"), (1, "d"), (0, "c")}
    },
    "'x' in sys.modules, sys.modules.get('y')": {"imports": {(0, "y")}},
    "sys.modules[__name__].x": {"imports": {(0, OWN_NAME)}},
    "sys.modules[m]": {"any_module": True},
    "importlib.import_module(m)": {"any_module": True},
}


@pytest.mark.parametrize("expression", READS)
def test_reads_by_strings(expression):
    made = {}
    exec(f"def function(m):\n    return {expression}", made)
    found = by_string(made["function"].__code__)._asdict()
    assert {name: value for name, value in found.items() if value} == READS[expression]


def test_a_module_that_the_function_imports():
    def function(m):
        import cfg

        return getattr(cfg, m)

    assert by_string(function.__code__).computed == {(("cfg",), "")}
