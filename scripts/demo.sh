#!/usr/bin/env bash
# The whole path in one go, on scikit-learn's digits: two processes train, then evaluate, then export.
set -euo pipefail
cd "$(dirname "$0")/.."

lockstep=.venv/bin/lockstep
run=runs/demo-$(date +%Y%m%d-%H%M%S)

"$lockstep" train examples/digits.yaml run.name="$(basename "$run")" launch.processes=2
"$lockstep" evaluate "$run"
"$lockstep" export "$run"

cat <<END

Everything is in $run:
  recipe.yaml     the config as it was run        metrics.jsonl, summary.json   what came out
  checkpoints/    to resume or evaluate           export/                       the model, for others to load
  tensorboard/    curves                          logs/                         one file per process

What to type next (after: source .venv/bin/activate):
  tensorboard --logdir runs                        look at the curves
  lockstep train examples/digits.yaml run.name=one launch.processes=1
  lockstep compare $run runs/one                   the same bits from one process
  lockstep init mnist                              write a config of your own
END
