"""Every model of the zoo trains without a pipeline. These runs are the oracle for pipelines."""

import numpy as np
import pytest

from tests.mpmd.zoo.base import Case, language_loss, plain_run
from tests.mpmd.zoo.models import BY_NAME, CASES

MOMENT = "optimizer/opt_state/0/mu/"


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_the_plain_step_trains_every_used_parameter(case: Case):
    run = plain_run(case)
    assert all(np.isfinite(x).all() for row in run.metrics for x in row.values())
    assert run.metrics[0]["loss"] != run.metrics[1]["loss"]
    moments = {path.removeprefix(MOMENT): x for path, x in run.after.items() if path.startswith(MOMENT)}
    unchanged = {path for path, moment in moments.items() if not moment.any()}
    assert moments and unchanged == set(case.unused)
    for path in moments.keys() - unchanged:
        assert not np.array_equal(run.before[f"model/{path}"], run.after[f"model/{path}"]), path


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_that_remain_in_the_model_raise():
    sowing = BY_NAME["sow_popped"]._replace(name="sow_left", loss_fn=language_loss)
    with pytest.raises(ValueError, match=r"the step changed:\n(.*\n)*layers/.*/change.*: the call added"):
        plain_run(sowing)
