"""Solutions in judged steps to tokens, where the line break behind a step is several tokens, a part of others, or
none."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.data.rows import Stepwise
from core.errors import SpecError
from core.spec.axes.rendering import ModelTemplate
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer

ROW = Stepwise("1 + 1?", ("take 1", "so 2"), (True, False))
LETTERS = sorted(set("1 + 1?take 1so 2") - {" "})


def wrapped(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def in_bytes() -> Any:
    """As tokenizers of SentencePiece: a text begins with a blank of its own, and bytes stand for unknown characters.
    A line break by itself is two tokens."""
    names = ["<unk>", "</s>", "▁", *LETTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = models.BPE({name: at for at, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return wrapped(tokenizer)


def merged() -> Any:
    """A line break has no token but with what follows it: by itself it falls to bytes, before a `t` it would not."""
    names = ["<unk>", "</s>", " ", *LETTERS, "\nt", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [(name, -20.0 if name.startswith("<0x") else -1.0) for name in names]
    return wrapped(Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True)))


def in_words() -> Any:
    """Texts are cut at blanks and line breaks, which are dropped."""
    names = ["<unk>", "</s>", "1", "+", "1?", "take", "so", "2"]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(tokenizer)


def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer, RenderOptions(rendering=ModelTemplate(pairs="space"), row_format="stepwise"))


@pytest.mark.parametrize(
    ("tokenizer", "border"), [(in_bytes(), ["▁", "<0x0A>"]), (merged(), ["<0x0A>"])], ids=["in bytes", "merged"]
)
def test_a_step_is_judged_at_the_last_token_of_its_separator(tokenizer: Any, border: list[str]) -> None:
    found = renderer(tokenizer).render_steps(ROW, 1)
    tokens = tokenizer.convert_ids_to_tokens(found.ids)
    judged = [at for at, learned in enumerate(found.learned) if learned]
    assert len(judged) == 2 and judged[-1] == len(tokens) - 1
    for at in judged:
        assert tokens[at - len(border) + 1 : at + 1] == border
    assert "\nt" not in tokens, "no token spans a border"
    between = tokens[judged[0] + 1 : judged[1] - len(border) + 1]
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(between)).strip().replace(" ", "") == "so2"


def test_a_tokenizer_without_a_separator_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no token for the separator '\\n'") as refused:
        renderer(in_words()).render_steps(ROW, 1)
    assert refused.value.field == "model"
