"""Every registered method against the public contract, at a tight and at a loose budget."""

import pytest

import numattn
from numattn import testing


def cases():
    for record in numattn.methods():
        for label, method in testing.budgets(record).items():
            for name in testing.checks_for(method):
                reason = record.info.exceptions.get(name)
                marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
                yield pytest.param(
                    method, name, id=f"{record.info.name}-{label}-{name}", marks=marks
                )


@pytest.mark.parametrize(("method", "name"), list(cases()))
def test_contract(method, name):
    testing.run(name, method)
