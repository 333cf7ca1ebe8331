"""Data from the user's Python file."""

from lockstep.base import plugins
from lockstep.base.contracts import Source
from lockstep.base.errors import DataError
from lockstep.core.numerics.seeds import generators_restored, seed_all
from lockstep.data.preparation import preparation_of, with_inputs_known
from lockstep.data.sources.user import Config
from lockstep.data.torch_dataset import as_source


def build(config: Config, split: str) -> Source:
    """Call the file's `source` for "train" or "test". Raises DataError when it does not return a data set."""
    module = plugins.load_file(config.file, "data.file")
    if not hasattr(module, "source"):
        raise DataError(f"{config.file} has no function source(options, split)")
    collate = getattr(module, "collate", None)
    is_own = callable(collate) and not str(getattr(collate, "__module__", "")).startswith("lockstep.")
    where = f"the {split} split that source() in {config.file} returned"
    with generators_restored():
        seed_all(0)  # so that random_split() divides the data alike for both splits, in every process and run
        made = module.source(config.options, split)
    source = as_source(made, collate if is_own else None, where)
    return with_inputs_known(source, preparation_of(config.file))
