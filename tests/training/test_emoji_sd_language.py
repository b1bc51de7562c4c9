"""Names, captions, the held-out split, the fixed prompt sets and the tokens that training sees."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from training.emoji_sd.scenes import SceneSampler

from rocm_sd.models.emoji import (
    COLOUR_JITTER,
    COLOURS,
    EMOJI,
    POSITIONS,
    Scene,
    caption,
    find_emoji,
    held_out_pair_prompts,
    held_out_prompts,
    is_held_out,
    is_held_out_pair,
    nearest_colour,
    plain_caption,
    trained_prompts,
)


def test_there_are_thousands_of_emoji_with_unique_names():
    assert len(EMOJI) > 3500
    names = [emoji.name.lower() for emoji in EMOJI]
    assert len(set(names)) == len(names)
    aliases = [alias.lower() for emoji in EMOJI for alias in emoji.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(names)


def test_names_read_as_a_person_would_write_them():
    assert find_emoji("🍎").name == "red apple"
    assert find_emoji("🇫🇷").name == "flag of France"
    assert find_emoji("👋🏾").name == "waving hand with medium-dark skin tone"
    assert find_emoji("coffee").text == "☕"
    assert find_emoji("a word nobody uses") is None


def test_looks_point_to_the_first_of_their_kind():
    assert all(EMOJI[emoji.look].look == emoji.look <= emoji.id for emoji in EMOJI)
    assert 0 < sum(emoji.look != emoji.id for emoji in EMOJI) < 50


def test_colours_stay_apart_under_jitter():
    for a, b in itertools.combinations(COLOURS.values(), 2):
        assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 4 * COLOUR_JITTER
    assert nearest_colour((250, 149, 190)) == "pink"


def test_plain_captions():
    frog, apple = find_emoji("frog").id, find_emoji("red apple").id
    assert plain_caption(Scene((frog,), "pink")) == "a frog on a pink background"
    assert plain_caption(Scene((apple,), "orange", size="small")) == "a small red apple on an orange background"
    assert plain_caption(Scene((frog, apple), relation="next to")) == "a frog next to a red apple"


def test_captions_depend_on_the_random_state_alone_and_say_what_the_scene_holds():
    scene = Scene((find_emoji("frog").id,), "cyan", position="on the left")
    said = [caption(scene, Random(seed)) for seed in range(60)]
    assert said == [caption(scene, Random(seed)) for seed in range(60)]
    assert len(set(said)) > 5
    assert all("frog" in text and "cyan background" in text and "on the left" in text for text in said)


def test_about_a_tenth_is_held_out_and_every_emoji_keeps_most_colours():
    held = [sum(is_held_out(emoji.id, colour) for colour in COLOURS) for emoji in EMOJI]
    assert 0.09 < sum(held) / (len(EMOJI) * (len(COLOURS) - 1)) < 0.11
    assert max(held) < len(COLOURS) - 3
    assert not any(is_held_out(emoji.id, "white") or is_held_out(emoji.id, None) for emoji in EMOJI)
    pairs = [is_held_out_pair(a, b) for a in range(0, 3000, 60) for b in range(1, 3000, 60)]
    assert 0.08 < sum(pairs) / len(pairs) < 0.12
    assert all(is_held_out_pair(a, b) == is_held_out_pair(b, a) for a, b in ((1, 9), (40, 3), (7, 700)))


def test_training_never_shows_what_is_held_out():
    seen_colours, seen_pairs = 0, 0
    for step in range(8):
        for picture in SceneSampler(seed=3).batch(step, 512):
            scene = picture.scene
            seen_colours += scene.colour is not None
            assert not any(is_held_out(index, scene.colour) for index in scene.objects)
            if len(scene.objects) == 2:
                seen_pairs += 1
                assert not is_held_out_pair(*scene.objects)
    assert seen_colours > 1500
    assert seen_pairs > 300


def test_scenes_depend_on_seed_and_step_alone():
    assert SceneSampler(1).batch(5, 20) == SceneSampler(1).batch(5, 20)
    assert SceneSampler(1).batch(5, 20) != SceneSampler(1).batch(6, 20)
    assert SceneSampler(1).batch(5, 20) != SceneSampler(2).batch(5, 20)


def test_prompt_sets_are_fixed_and_keep_to_their_side_of_the_split():
    trained, unseen, pairs = trained_prompts(300), held_out_prompts(300), held_out_pair_prompts(50)
    assert trained == trained_prompts(300)
    assert trained[:100] == trained_prompts(100)
    assert trained != trained_prompts(300, seed=1)
    assert len({prompt.emoji for prompt in trained}) == 300
    assert all(not is_held_out(prompt.emoji[0], prompt.colour) for prompt in trained)
    assert all(is_held_out(prompt.emoji[0], prompt.colour) for prompt in unseen)
    assert all(f"{prompt.colour} background" in prompt.text for prompt in unseen)
    assert len(pairs) == 50
    assert all(is_held_out_pair(*prompt.emoji) for prompt in pairs)


def test_assembled_tokens_equal_the_tokenizers(cache):
    from training.emoji_sd.tokenizer import CONTEXT, PhraseTokens
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(cache / "tokenizer")
    captions = [picture.phrases for picture in SceneSampler(0).batch(0, 1500)]
    assembled = PhraseTokens(tokenizer).batch(captions, 0.0, Random(0))
    texts = [" ".join(phrases) for phrases in captions]
    whole = tokenizer(texts, padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt")
    assert assembled.tolist() == whole["input_ids"].tolist()
    dropped = PhraseTokens(tokenizer).batch(captions, 1.0, Random(0))
    assert dropped[0].tolist() == tokenizer("", padding="max_length", max_length=CONTEXT)["input_ids"]


@pytest.mark.parametrize("text", ["a frog on a pink background", "flag of France", "naïve 漢字 \U0001f438"])
def test_the_tokenizer_gives_back_what_it_read(cache, text):
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(cache / "tokenizer")
    assert len(tokenizer) == 3072
    assert tokenizer.model_max_length == 77
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text.lower()


def test_every_position_has_its_own_words():
    assert len(set(POSITIONS.values())) == len(POSITIONS) == 9
