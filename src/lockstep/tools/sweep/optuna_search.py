"""Suggestions and pruning by optuna, whose study is rebuilt each time from the trials so far: it keeps no state."""

import json
import math
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from lockstep.tools.sweep.search_space import SweptKey, override_text, rounded
from lockstep.tools.sweep.sweep_state import Measured, Sweep

STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
SEEDS = 2**31
MOST_REPEATS = 100
"""Number of repeated suggestions in a row after which no other settings are assumed to exist."""


def suggestion(sweep: Sweep, *, seed: int) -> dict[str, Any] | None:
    """Suggest settings not tried yet, by the tree-structured Parzen estimator; None where there are no others."""
    tried = {override_text(trial.settings) for trial in sweep.trials}
    for attempt in range(MOST_REPEATS):
        study = _study(sweep, seed=(seed + len(sweep.trials) * MOST_REPEATS + attempt) % SEEDS)
        asked = study.ask(_distributions(sweep.keys)).params
        settings = {
            key.key: json.loads(asked[key.key]) if key.ends is None else rounded(key, asked[key.key])
            for key in sweep.keys
        }
        if override_text(settings) not in tried:
            return settings
    return None


def clearly_worse(sweep: Sweep, evaluations: Sequence[Measured]) -> int | None:
    """Return the index of the first evaluation at which optuna's MedianPruner ends a trial; None for none."""
    trial = _study(sweep, seed=0).ask()
    for index, own in enumerate(evaluations):
        trial.report(_number(sweep, own.value), index)
        if trial.should_prune():
            return index
    return None


def _study(sweep: Sweep, *, seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="minimize" if sweep.lower_is_better else "maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(),
    )
    for each in sweep.ended:
        params = {key.key: each.settings[key.key] for key in sweep.keys}
        params |= {key.key: override_text(params[key.key]) for key in sweep.keys if key.ends is None}
        trial = optuna.trial.create_trial(
            state=STATES[each.state],
            value=each.value if each.state == "finished" else None,
            params=params,
            distributions=_distributions(sweep.keys),
            intermediate_values={i: _number(sweep, measured.value) for i, measured in enumerate(each.evaluations)},
        )
        study.add_trial(trial)
    return study


def _distributions(keys: Sequence[SweptKey]) -> dict[str, BaseDistribution]:
    return {key.key: _distribution(key) for key in keys}


def _distribution(key: SweptKey) -> BaseDistribution:
    """Return the distribution of a key; listed values are categories, as JSON: optuna takes no lists."""
    if isinstance(key.low, int) and isinstance(key.high, int):
        return IntDistribution(key.low, key.high, log=key.is_log)
    if key.ends is not None:
        return FloatDistribution(*key.ends, log=key.is_log)
    return CategoricalDistribution([override_text(value) for value in key.values])


def _number(sweep: Sweep, value: float | None) -> float:
    """Return the value for optuna; a value that is not finite is worse than any number."""
    return value if value is not None else math.inf if sweep.lower_is_better else -math.inf
