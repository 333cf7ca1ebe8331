"""`lockstep data`."""

from lockstep.cli._common import ConfigFile, Overrides, TrustCode, console, load_trusted


def command(path: ConfigFile, overrides: Overrides = None, trust_code: TrustCode = False) -> None:
    """Download and prepare data, tokens and the pretrained model without training; resumes where it was stopped."""
    recipe = load_trusted(path, overrides, trusts=trust_code)
    from lockstep.base import plugins
    from lockstep.base.events import Bus
    from lockstep.recipe.build import build_model
    from lockstep.recipe.splits import prepare_splits

    bus = Bus()
    bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
    try:
        splits = prepare_splits(recipe, bus.publish)
        model = build_model(recipe, splits.train.spec)
    finally:
        bus.close()
    parameters, spec = sum(p.numel() for p in model.parameters()), splits.train.spec
    targets = f"{len(spec.labels)} labels"
    if spec.vocabulary is not None:
        targets = f"{spec.vocabulary:,} different tokens"
    elif spec.numbers:
        targets = f"numbers ({', '.join(spec.numbers)})"
    console.print(
        f"ready: {len(splits.train):,} training and {len(splits.test):,} test samples, {targets}; "
        f"model {recipe.model.kind} with {parameters:,} parameters"
    )
