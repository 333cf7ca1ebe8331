"""Settings of AG News."""

from pathlib import Path

from lockstep.base.remote_path import DataPath
from lockstep.data.data_config import DataSection, Origin

HUB_NAME = "fancyzhx/ag_news"


class Config(DataSection):
    """AG News: titles and first sentences of news items, in four classes."""

    modality = "text"
    objective = "classification"

    root: DataPath = Path("data")
    """Folder with train.csv and test.csv, or with a subfolder ag_news that has them; else they come from the hub."""

    def origin(self) -> Origin:
        return Origin(name="AG News", hub=HUB_NAME, language=("en",))
