"""The loop of most tutorials: DDP, a sample at a time, texts padded to 128 tokens, fp32, `.item()` in every step."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import Arguments, arguments
from gpt import BYTES, GPT, SIZES, sequences
from meter import Meter
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from works import CNN, MAX_LENGTH, normalized, read_images, read_texts, text_model, tokenizer

Sample = tuple[dict[str, Tensor] | Tensor, Tensor]


class Images(Dataset[Sample]):
    def __init__(self, given: Arguments) -> None:
        self.images, self.labels = read_images(given.data, "train")
        self.samples = given.work.samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        return normalized(torch.tensor(self.images[index])), torch.tensor(self.labels[index])


class Texts(Dataset[Sample]):
    def __init__(self, given: Arguments) -> None:
        self.texts, self.labels = read_texts(given.data, given.work.samples)
        self.tokenizer = tokenizer(given.model)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        encoded = self.tokenizer(
            self.texts[index], truncation=True, padding="max_length", max_length=MAX_LENGTH, return_tensors="pt"
        )
        return {name: column[0] for name, column in encoded.items()}, torch.tensor(self.labels[index])


class Sequences(Dataset[Sample]):
    def __init__(self, given: Arguments) -> None:
        self.rows = torch.tensor(sequences(SIZES[given.work.model], given.work.samples)).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index, :-1], self.rows[index, 1:]


def network(given: Arguments) -> nn.Module:
    if given.work.is_text:
        return text_model(given.work.model, given.model)
    return CNN() if given.work.model == "cnn" else GPT(SIZES[given.work.model])


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = (Texts if given.work.is_text else Images if given.work.model == "cnn" else Sequences)(given)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=given.batch, sampler=sampler)
    model = DistributedDataParallel(network(given))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.work.learning_rate)
    meter, total = Meter(given.out, given.rank, given.work.steps), 0.0
    sampler.set_epoch(0)
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
        loss = F.cross_entropy(outputs.view(-1, BYTES) if outputs.ndim == 3 else outputs, labels.view(-1))
        loss.backward()
        optimizer.step()
        total += loss.item()
        meter.step()
    meter.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
