"""May this draft serve this target as it is? Both must mean the same text by the same token ids."""

from __future__ import annotations

from tokenizers import Tokenizer

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import TokenizerFiles


def vocabulary(files: TokenizerFiles, where: str) -> dict[str, int]:
    """The token -> id map, added tokens included.

    Raises:
        OutriderError: the tokenizer does not load.
    """
    try:
        return dict(Tokenizer.from_str(files.json).get_vocab(with_added_tokens=True))
    except Exception as error:  # the library raises bare Exception
        raise OutriderError(f"{where}: its tokenizer.json does not load ({error})") from None


def check_pair(target: dict[str, int], draft: dict[str, int]) -> None:
    """Raises OutriderError naming the first id (or token) on which two token -> id maps differ.

    Sizes say nothing: equal sizes may hold other tokens, and models pad their embedding by different amounts.
    """
    if target == draft:
        return
    of_target = {index: token for token, index in target.items()}
    of_draft = {index: token for token, index in draft.items()}
    for index in sorted(of_target.keys() | of_draft.keys()):
        ours, theirs = of_target.get(index), of_draft.get(index)
        if ours != theirs:
            raise OutriderError(
                f"the draft has another tokenizer: id {index} is {_shown(ours)} for the target and {_shown(theirs)} "
                "for the draft; choose a draft of the target's family, --translate-draft, or --draft none"
            )


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
