"""State that is easily overlooked: of one thread, of a metaclass, in a custom operator, by a name
in a string."""

import hiddenkit
from corpus.entry import add

GROUP = "overlooked state"


def fresh(make):
    def made():
        hiddenkit.put_back()
        return make()

    return made


for name, (make, change, _) in (hiddenkit.CASES_OF_ONE_MODULE | hiddenkit.CASES_REFUSED).items():
    add(GROUP, name, fresh(make), mutate=change)
