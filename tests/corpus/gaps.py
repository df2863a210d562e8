"""Changes that nobody notices: torch's tracer has no guard for them, whoever uses it.

A module that depends on one of these computes on as if nothing had changed. They are left out of
the corpus that is judged, and of the tests of what is watched.
"""

GAPS = {
    "partial_subclass": "a subclass of functools.partial that overrides __call__ is called as a "
    "plain partial",
    "property_subclass": "a subclass of property that overrides __get__ is read as a plain one",
    "format_string_reads_attribute": "an attribute that str.format looks up is a constant",
    "descriptor_with_weak_key_storage": "a WeakKeyDictionary is read once, and is a constant",
    "effect_of_a_del": "__del__ of an object that forward makes does not run in a replay",
    "effect_of_del_not_named_in_forward": "__del__ of an object that forward makes does not run in "
    "a replay",
    "module_replaced_in_sys_modules": "a module of Python is read once: another one in sys.modules "
    "under its name is not seen",
    "OrderedDict, moved to the end": "an OrderedDict is compared as a dict, without move_to_end",
    "a function beneath torch.nn.functional": "functions that torch's own functions call (torch."
    "layer_norm) are not compared, if they are replaced",
}
