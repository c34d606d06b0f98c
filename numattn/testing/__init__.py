"""The public contract suite: ``numattn.testing.check(method)`` runs it on any method, yours too."""

from numattn.testing.checks import budgets as budgets
from numattn.testing.checks import check as check
from numattn.testing.checks import checks_for as checks_for
from numattn.testing.checks import run as run
from numattn.testing.inputs import Subject as Subject
from numattn.testing.inputs import make_qkv as make_qkv
from numattn.testing.inputs import reference as reference
from numattn.testing.inputs import reference_weights as reference_weights
from numattn.testing.layers import check_layer as check_layer
