"""Lightning with its documented settings for speed: bf16 mixed precision, DDP with a static graph, no logger, no
checkpoints, no progress bar."""

import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from accelerated import loader
from arguments import Arguments, arguments
from gpt import BYTES
from lightning.pytorch.strategies import DDPStrategy
from meter import Meter
from textbook import network
from torch import Tensor


class Module(lightning.LightningModule):
    def __init__(self, given: Arguments) -> None:
        super().__init__()
        self.given, self.net, self.meter = given, network(given), Meter(given.out, given.rank, given.work.steps)

    def training_step(self, batch: Any, _: int) -> Tensor:
        inputs, labels = batch
        outputs = self.net(**inputs).logits if isinstance(inputs, dict) else self.net(inputs)
        return F.cross_entropy(outputs.view(-1, BYTES) if outputs.ndim == 3 else outputs, labels.reshape(-1))

    def on_train_batch_end(self, *_: Any) -> None:
        self.meter.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.given.work.learning_rate, fused=True)


def main() -> None:
    given = arguments()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Module(given)
    ddp = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True, static_graph=True)
    trainer = lightning.Trainer(
        accelerator=given.device.type,
        devices=given.world,
        strategy=ddp if given.world > 1 else "auto",
        precision="bf16-mixed" if given.is_bf16 else "32-true",
        max_epochs=1,
        gradient_clip_val=None,  # not offered together with a fused optimizer
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(given))
    module.meter.finish()


if __name__ == "__main__":
    main()
