"""Settings of an adapter: small trained weights beside those of a model that stays as it is."""

from typing import Any, Literal

from pydantic import Field

from lockstep.base.config import Section
from lockstep.base.name_patterns import Patterns


class AdapterSection(Section):
    """Train small matrices beside frozen weights, by the library peft."""

    kind: Literal["lora", "loha", "lokr", "ia3"] = "lora"
    """lora (E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021), or another method of peft; dora
    and rslora are options of lora: {use_dora: true}, {use_rslora: true}."""
    rank: int = Field(8, ge=1, le=2**16)
    """Inner size of the matrices; ia3 has none."""
    alpha: float | None = Field(None, gt=0, le=2**16)
    """Their product is scaled by alpha / rank; by default 2, whatever the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of what goes into the matrices; lora only."""
    targets: Patterns = ()
    """Layers that get an adapter: names of modules, or shell patterns of them, such as "*.q_proj"; by default all
    linear layers of the numbered layers, such as those of attention and feed-forward blocks."""
    train: Patterns = ()
    """What is trained besides, as a whole: names of parameters or modules. A new head always is."""
    options: dict[str, Any] = {}
    """Further arguments of peft's config class."""
