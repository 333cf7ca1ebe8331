"""Texts that a language model generates at an evaluation."""

from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import torch

from lockstep.base.events import TextSample
from lockstep.core.numerics.seeds import seed_of
from lockstep.core.numerics.word_tokens import ids_of
from lockstep.data.chat import ChatTokenizer
from lockstep.data.packing import Windows
from lockstep.data.text_tokenizers import TextTokenizer
from lockstep.inference.generation.decoding import RecomputedDecoding
from lockstep.inference.generation.sampling import Sampling, next_token
from lockstep.recipe.components import Components

PROMPTS, PROMPT_BYTES = 2, 24
"""Number of texts, and the bytes of a test sample that each begins with."""
SAMPLING = Sampling(temperature=0.8)


def text_samples(parts: Components) -> tuple[TextSample, ...]:
    """Complete the beginnings of some test samples. Collective; the same texts on any number of processes."""
    count, tokenizer = parts.recipe.evaluate.sample_tokens, parts.data.tokenizer
    if not count or not isinstance(tokenizer, TextTokenizer):
        return ()
    prompts = [*_questions(parts)] if isinstance(tokenizer, ChatTokenizer) else [*_prompts(parts, tokenizer)]
    if not prompts:
        return ()
    decoding = RecomputedDecoding(parts.strategy.forward, parts.recipe.data.context, parts.device)
    generators = [torch.Generator().manual_seed(seed_of("text sample", number)) for number in range(len(prompts))]
    made: list[list[int]] = [[] for _ in prompts]
    with torch.no_grad():
        decoding.join(prompts)
        for _ in range(count):
            logits = decoding.logits.float().cpu()
            if not torch.isfinite(logits).all():
                break
            tokens = [next_token(*row) for row in zip(logits, [SAMPLING] * len(made), generators, strict=True)]
            for row, token in zip(made, tokens, strict=True):
                row.append(token)
            decoding.read(tokens)
    ends = tokenizer.special().ends
    ended = [[*takewhile(lambda token: token not in ends, row)] for row in made]
    return tuple(
        TextSample(prompt=tokenizer.decode(prompt), text=tokenizer.text_after(prompt, row))
        for prompt, row in zip(prompts, ended, strict=True)
    )


def _questions(parts: Components) -> Iterator[list[int]]:
    """Yield test chats up to their first answer, at most half a context of each."""
    test = parts.data.test
    assert isinstance(test, Windows)
    tokens = test.tokens
    for number in range(min(PROMPTS, len(tokens))):
        start, stop = tokens.offsets[(chat := number * len(tokens) // PROMPTS) : chat + 2]
        row = np.asarray(tokens.ids[start:stop])
        if (row >= 0).any():
            yield ids_of(row[: int((row >= 0).argmax())])[-(test.context // 2) :].tolist()


def _prompts(parts: Components, tokenizer: TextTokenizer) -> Iterator[list[int]]:
    """Yield beginnings of test samples that are spread over the split."""
    test = parts.data.test
    for number in range(min(PROMPTS, len(test))):
        columns = test.__getitems__([number * len(test) // PROMPTS])
        row = columns["input_ids"][0]
        if "document" in columns:  # the longest one of the sample
            row = row[columns["document"][0] == np.bincount(columns["document"][0]).argmax()]
        long_enough = tokenizer.token_bytes[row].cumsum() >= PROMPT_BYTES
        yield row[: int(long_enough.argmax()) + 1 if long_enough.any() else len(row) // 2 + 1].tolist()
