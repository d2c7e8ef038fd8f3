"""What the processes of a save must have in common (flax_rpsave/terms.py)."""

import numpy as np
import pytest

from flax_rpsave import terms
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.errors import SaveError
from flax_rpsave.planner import LeafLayout, MeshLayout, plan_leaves

CONFIG = CheckpointConfig(directory="runs/a")
MESH = MeshLayout((("x", 2),), (0, 1), (0, 1))


def plan_of(**shapes):
    leaves = [LeafLayout(name, shape, np.dtype("float32"), MESH, ((),) * len(shape)) for name, shape in shapes.items()]
    return plan_leaves(leaves, CONFIG.replica_parallel)


def terms_of(plan):
    return terms.terms_of(plan, CONFIG, None, has_data_state=False)


def test_the_leaf_that_differs_is_named_not_one_that_has_another_owner_for_it():
    first, more = plan_of(a=(4, 3)), plan_of(a=(4, 3), b=(400, 300))
    assert first.leaves[0].owners != more.leaves[0].owners
    with pytest.raises(SaveError, match=r"\(2 and 1 arrays\).* is number 1, there it is b: float32\[400, 300\]"):
        terms.check(1, terms_of(more), terms_of(first), more)
    with pytest.raises(SaveError, match=r"\(1 and 2 arrays\).* is number 1, which it does not have"):
        terms.check(1, terms_of(first), terms_of(more), first)


def test_equal_leaves_with_other_owners_are_refused():
    plan = plan_of(a=(4, 3))
    terms.check(1, terms_of(plan), terms_of(plan_of(a=(4, 3))), plan)
    with pytest.raises(SaveError, match="plans to save other slices"):
        terms.check(1, terms_of(plan), {**terms_of(plan), "owners": "others"}, plan)
