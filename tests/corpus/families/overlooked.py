"""State that is easily overlooked: of one thread, of a metaclass, in a custom operator, by a name in a string."""

import hiddenkit
from corpus.entry import add

GROUP = "overlooked state"
# Any loaded module may be meant, so all are compared: minutes where transformers is loaded. In test_graph_state_watch.
SLOW = ("a module by a computed name", "an attribute of a module, both names computed")


def fresh(make):
    def made():
        hiddenkit.put_back()
        return make()

    return made


for name, (make, change, _) in hiddenkit.CASES_OF_ONE_MODULE.items():
    if name not in SLOW:
        add(GROUP, name, fresh(make), mutate=change)
