import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.errors import DataError
from asyncflow_core.parts import PartContext, encode_prompt
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer


def characters(**options):
    return CharactersTokenizer(
        CharactersOptions(**{"alphabet": "abc +1", **options}), PartContext()
    )


@given(st.text("abc +1"), st.booleans(), st.booleans())
def test_decode_gives_back_what_was_encoded(text, eos, bos):
    tokenizer = characters(eos=eos, bos=bos)
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, *tokenizer.eos_token_ids]) == text
    assert len(ids) == len(text) + bos
    assert all(0 <= i < tokenizer.vocab_size for i in [*ids, *tokenizer.eos_token_ids])


def test_special_ids_follow_the_alphabet():
    tokenizer = characters(bos=True)
    assert (tokenizer.eos_token_ids, tokenizer.encode("a"), tokenizer.vocab_size) == (
        (6,),
        [7, 0],
        8,
    )
    assert encode_prompt(tokenizer, "a") == [7, 0]


def test_unknown_character_or_id_refused():
    with pytest.raises(DataError, match="'z'"):
        characters().encode("az")
    with pytest.raises(DataError, match="token id 7"):
        characters().decode([0, 7])
    with pytest.raises(ValueError, match="'a' more than once"):
        characters(alphabet="aba")
