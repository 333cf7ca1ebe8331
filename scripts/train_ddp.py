"""Fine-tune DistilBERT on AG News with DDP, with the flags of the usual script; writes a state dict.

    python scripts/train_ddp.py [--num_samples 1000] [--epochs 3] [--data_dir FOLDER] [--nprocs 2] ...
    torchrun --nproc-per-node=2 scripts/train_ddp.py ...

Both give the same weights, bit for bit, as does any number of processes. To load them:

    model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=4)
    model.load_state_dict(torch.load("distilbert_agnews.pt"))
    tokenizer = AutoTokenizer.from_pretrained("distilbert_agnews_tokenizer")    # a folder beside --output
"""

import sys
from pathlib import Path

from ddp_script import ScriptFlags, run, shared_sections


def main(words: list[str]) -> int:
    """Read the flags, train and write the weights; returns the exit code."""
    flags = ScriptFlags((__doc__ or "").partition("\n\n")[0], separator="_")
    flags.flag("model name", default="distilbert-base-uncased", help="on the hub, or a folder (default: %(default)s)")
    flags.flag("max length", type=int, default=128, help="tokens of a text (default: %(default)s)")
    flags.flag("weight decay", type=float, default=0.01, help="(default: %(default)s)")
    flags.flag("warmup ratio", "warmup steps", type=float, default=0.0, help="below 1 a part of the run, else steps")
    flags.flag("max grad norm", type=float, default=1.0, help="0: no clipping (default: %(default)s)")
    flags.flag("logging steps", type=int, default=10, help="(default: %(default)s)")
    given = flags.read(words, epochs=3.0, lr=2e-5, batch_size=32, num_samples=0, output=Path("distilbert_agnews.pt"))

    sections = shared_sections(given, "distilbert-agnews")
    sections["data"] |= {"kind": "ag_news", **({"root": given.data_dir} if given.data_dir else {})}
    sections["model"] = {"kind": "transformer", "name": given.model_name, "max_length": given.max_length}
    sections["optim"] |= {"weight_decay": given.weight_decay, "clip": given.max_grad_norm or None}
    sections["schedule"] = {"shape": "linear", "warmup": given.warmup_ratio}
    sections["observe"] = {"log_every": given.logging_steps}
    return run(sections, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
