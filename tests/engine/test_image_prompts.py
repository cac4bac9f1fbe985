# SPDX-License-Identifier: Apache-2.0
"""Images in requests: what reads a prompt's ids, when images are encoded, and what faults leave."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from scripted_images import data_url, file_of, picture
from seeing_hash_model import encode_layer_by_layer
from tiny_models import save_tiny_model
from tiny_vision_models import (
    IMAGE,
    TEMPLATE,
    VOCAB_SIZE,
    save_tiny_vision_model,
    shown,
    template_ids,
    words,
)

from radixkv import LLM, SamplingParams
from radixkv.cluster.remote import wire
from radixkv.errors import InvalidRequestError
from radixkv.images.placed_image import FIRST_IMAGE_ID, image_ids
from radixkv.model.vision.encoder_cache import EncoderCache
from radixkv.scheduling.request import Request

ONE, TWO = shown(1), shown(2)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("sees"), "qwen2_5_vl")


def open_llm(folder: Path, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"max_model_len": 512, "num_blocks": 64, "warm_up": "off", **options}
    return LLM(str(folder), device="cpu", **chosen)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as made:
        yield made


def placed(llm: LLM, *parts: Any) -> tuple[np.ndarray[Any, Any], tuple[Any, ...]]:
    processor: Any = llm.engine.model.image_processor
    ids, images = processor.place(*template_ids(parts))
    return np.array(ids), images


def request(llm: LLM, *parts: Any, params: SamplingParams = GREEDY, **options: Any) -> Request:
    ids, images = placed(llm, *parts)
    return Request(ids, params, images=images, **options)


def run(llm: LLM, *requests: Request) -> list[Any]:
    finished: dict[str, Any] = {}
    ids = [llm.engine.add(each) for each in requests]
    while not finished.keys() >= set(ids):
        finished.update((output.request_id, output) for output in llm.engine.step().finished)
        llm.engine.cache.check()
    return [finished[each] for each in ids]


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


# ---------------------------------------------------------------------- identity


def test_ids_follow_from_pixels_settings_and_place_alone(llm: LLM, folder: Path) -> None:
    ids, (image,) = placed(llm, words(1, 5), ONE, words(2, 3))
    own = ids[image.start : image.end]
    assert len(set(own.tolist())) == image.length == 24
    assert (own >= FIRST_IMAGE_ID).all()
    assert own.tolist() == list(image_ids(image.identity, 24))
    again, _ = placed(llm, words(3, 50), ONE)
    assert again[-25:-1].tolist() == own.tolist()
    other, _ = placed(llm, TWO)
    assert not set(other.tolist()) & set(own.tolist())
    elsewhere: Any = pickle.loads(pickle.dumps(llm.engine.model.image_processor))
    there, images = elsewhere.place(*template_ids([words(1, 5), ONE, words(2, 3)]))
    assert there == ids.tolist()
    assert wire.loads(wire.dumps(images)) == images
    settings = dict(elsewhere.processor.to_dict(), image_mean=[0.1, 0.2, 0.3])
    changed = type(elsewhere)("qwen2_5_vl", type(elsewhere.processor)(**settings), IMAGE, elsewhere.facts)
    assert changed.place(*template_ids([ONE]))[0] != placed(llm, ONE)[0].tolist()


def test_a_prompt_and_its_images_must_fit_together(llm: LLM, tmp_path: Path) -> None:
    ids, images = placed(llm, words(1, 5), ONE, words(2, 3))
    _, others = placed(llm, words(1, 5), TWO, words(2, 3))
    for prompt, given, why in (
        (ids, (), "an image behind 0 that is not given"),
        (ids, others, "other tokens at 6 than those of its image"),
        (ids[1:], images, "that is not given|other tokens"),
        (ids[:20], images, "other places"),
        (words(1, 60), images, "other tokens at 6"),
        ([*ids, FIRST_IMAGE_ID], images, "an image behind 30 that is not given"),
        ([VOCAB_SIZE], (), "out of range"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            llm.engine.add(Request(prompt, GREEDY, images=given))
    with pytest.raises(InvalidRequestError, match="2 places for images, and 1 images"):
        llm.engine.model.image_processor.place([IMAGE, IMAGE], [ONE])  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="aspect ratio"):
        llm.engine.model.image_processor.num_tokens(5000, 4)  # type: ignore[union-attr]
    assert llm.engine.requests == []
    with open_llm(save_tiny_model(tmp_path, "llama")) as blind:
        with pytest.raises(InvalidRequestError, match="text only"):
            blind.engine.add(Request(words(1, 60), GREEDY, images=images))
        with pytest.raises(InvalidRequestError, match="out of range"):
            blind.engine.add(Request(ids, GREEDY))
        with pytest.raises(InvalidRequestError, match="text only"):
            blind.generate({"prompt": "x", "multi_modal_data": {"image": picture()}}, GREEDY)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- readers of ids


def test_every_reader_of_a_prompts_ids_takes_images(folder: Path) -> None:
    events: list[Any] = []
    with open_llm(folder, speculation="auto") as llm:
        llm.engine.cache.subscribe(events.append)
        parts = (words(1, 20), ONE, words(2, 30))
        params = SamplingParams(
            temperature=0,
            max_tokens=8,
            ignore_eos=True,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            logprobs=2,
            prompt_logprobs=1,
            bad_words=["x"],
            n=2,
        )
        first, hot = (
            run(llm, request(llm, *parts, params=params)),
            run(llm, request(llm, *parts, params=params)),
        )
        assert [tokens(each) for each in first] == [tokens(each) for each in hot]
        ids = first[0].prompt_token_ids
        assert max(ids) >= FIRST_IMAGE_ID
        assert all(token < VOCAB_SIZE for each in first[0].outputs for token in each.token_ids)
        stored = {token for event in events for run in event.stored for token in run.token_ids}
        assert set(placed(llm, ONE)[0].tolist()) <= stored
        tokenizer = llm.tokenizer
        assert tokenizer.decode(ids) == tokenizer.decode([token for token in ids if token < FIRST_IMAGE_ID])
        assert [tokenizer.token_text(token) for token in ids if token >= FIRST_IMAGE_ID] == [""] * 24
        stream = tokenizer.stream()
        assert stream.push(ids) + stream.finish() == tokenizer.decode(ids)
        report = llm.explain(ids)
        assert report.num_hit_tokens >= len(ids) - 1
        other = llm.explain(np.array(placed(llm, words(1, 20), TWO, words(2, 30))[0]))
        assert other.num_hit_tokens == 21
        llm.engine.cache.pin(ids)
        assert llm.engine.cache.tree.show()
        with pytest.raises(InvalidRequestError, match="that is not given"):
            llm.generate(ids, GREEDY)


def test_a_guess_never_goes_on_with_an_image(folder: Path) -> None:
    """The answer to a text repeats what came before an image in an earlier prompt."""
    with open_llm(folder, speculation="auto") as llm:
        repeated = words(7, 3) * 8
        parts = [*([repeated, ONE] * 3), repeated]
        alone = tokens(run(llm, request(llm, *parts))[0])
        run(llm, request(llm, repeated, alone, ONE, repeated, alone, TWO, repeated, alone))
        assert tokens(run(llm, request(llm, *parts))[0]) == alone


def test_messages_and_prompts_take_images_in_all_their_forms(llm: LLM, tmp_path: Path) -> None:
    drawn = picture(1, (96, 64))
    path = tmp_path / "one.png"
    path.write_bytes(file_of(drawn))
    text = {"type": "text", "text": "What is this?"}
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": drawn},
        {"type": "image", "image": path},
        {"type": "image", "image": file_of(drawn)},
        {"type": "image_url", "image_url": {"url": data_url(drawn)}},
    ]
    outputs = [llm.chat([{"role": "user", "content": [form, text]}], GREEDY)[0] for form in forms]
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    assert outputs[-1].num_cached_tokens == len(outputs[-1].prompt_token_ids) - 1
    asked = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>Say", "multi_modal_data": {"image": drawn}}
    (output,) = llm.generate(asked, GREEDY)  # type: ignore[arg-type]
    assert max(output.prompt_token_ids) >= FIRST_IMAGE_ID
    assert "".join(delta.text for delta in llm.stream(asked, GREEDY)) == output.outputs[0].text  # type: ignore[arg-type]
    for bad in ({"image": 5}, {"video": drawn}, {"image": b"none"}):
        with pytest.raises(InvalidRequestError):
            llm.generate({**asked, "multi_modal_data": bad}, GREEDY)  # type: ignore[arg-type]


def test_images_of_results_are_in_the_users_words_where_the_template_has_no_place_for_them(llm: LLM) -> None:
    template = TEMPLATE.replace(
        "part['type'] == 'image'", "part['type'] == 'image' and message['role'] != 'tool'"
    )
    image = {"type": "image", "image": picture(1, (96, 64))}
    asked, more = {"role": "user", "content": "Look"}, {"role": "user", "content": "And?"}
    text = {"type": "text", "text": "seen"}
    result = {"role": "tool", "content": [text, image]}
    moved = {"role": "tool", "content": "seen\n[image: in the next message]"}

    def prompt(*messages: Any, **options: Any) -> list[int]:
        return llm.chat(list(messages), GREEDY, **options)[0].prompt_token_ids  # type: ignore[no-any-return]

    for behind in ([], [more]):
        shown = {
            "role": "user",
            "content": [image, *({"type": "text", "text": each["content"]} for each in behind)],
        }
        found = prompt(asked, result, *behind, chat_template=template)
        assert sum(token >= FIRST_IMAGE_ID for token in found) == 24
        assert found == prompt(asked, moved, shown, chat_template=template)
        assert prompt(asked, result, *behind) != found  # this template has a place for it
    answered = {"role": "assistant", "content": "So"}
    found = prompt(asked, result, answered, more, chat_template=template)
    assert found == prompt(
        asked, moved, {"role": "user", "content": [image]}, answered, more, chat_template=template
    )


# ---------------------------------------------------------------------- encoding


def test_streams_go_on_while_an_image_is_encoded(llm: LLM) -> None:
    engine = llm.engine
    encode_layer_by_layer(engine)
    stream = Request(words(1, 9), SamplingParams(max_tokens=400, ignore_eos=True), stream=True)
    engine.add(stream)
    while not engine.step().deltas:
        pass
    seeing = request(llm, words(2, 9), ONE, words(3, 5))
    engine.add(seeing)
    steps = 0
    while not seeing.samples[0].was_admitted:
        result = engine.step()
        steps += 1
        assert [delta.request_id for delta in result.deltas] == [stream.request_id]
    assert steps >= 2  # the tower has two layers
    engine.abort(stream.request_id)
    while not seeing.is_finished:
        engine.step()
    images = engine.stats().images
    assert images is not None
    assert images.encoded == 1
    assert images.encode_s > 0


def test_aborts_while_images_are_encoded_leave_nothing(llm: LLM) -> None:
    engine = llm.engine
    encode_layer_by_layer(engine)
    for num_steps in range(5):
        one, two = request(llm, words(num_steps, 9), ONE), request(llm, words(9 + num_steps, 9), TWO)
        engine.add(one)
        engine.add(two)
        for _ in range(num_steps):
            engine.step()
        engine.abort(one.request_id)
        assert tokens(run(llm, request(llm, words(90, 9), TWO))[0])
        engine.abort(two.request_id)
        while engine.has_work:
            engine.step()
    engine.cache.check()
    engine.runner.images.cache.check()  # type: ignore[attr-defined]
    assert engine.requests == []


def test_an_image_that_fails_ends_its_own_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = llm.engine.runner.images.vision  # type: ignore[attr-defined]
    encode, bad = vision.encode, vision.prepare(TWO)["pixel_values"]

    def fail_on_two(inputs: dict[str, Any]) -> Any:
        if inputs["pixel_values"].equal(bad):
            raise RuntimeError("the tower is broken")
        return encode(inputs)

    monkeypatch.setattr(vision, "encode", fail_on_two)
    parts = [words(1, 20), ONE, words(2, 5)], [words(1, 20), TWO, words(2, 5)], [words(3, 40)]
    good, failed, text = run(llm, *(request(llm, *each) for each in parts))
    assert failed.error is not None
    assert good.error is text.error is None
    monkeypatch.undo()
    assert tokens(run(llm, request(llm, *parts[0]))[0]) == tokens(good)


def test_namespaces_share_no_encodings(llm: LLM) -> None:
    for namespace in ("ann", "bob"):
        run(llm, request(llm, words(1, 20), ONE, words(2, 5), namespace=namespace))
    assert llm.engine.runner.images.num_encoded == 2  # type: ignore[attr-defined]


def test_prompts_with_more_images_than_are_kept_are_answered(folder: Path) -> None:
    pictures = [shown(seed) for seed in range(4)]
    parts = [part for each in pictures for part in (words(5, 4), each)]
    with open_llm(folder, max_num_batched_tokens=40) as llm:
        expected = tokens(run(llm, request(llm, *parts))[0])
    with open_llm(folder, max_num_batched_tokens=40) as llm:
        size = llm.engine.runner.images  # type: ignore[attr-defined]
        size.cache = EncoderCache(1)
        together = run(llm, *(request(llm, *parts, namespace=name) for name in ("", "ann", "bob")))
        assert [tokens(each) for each in together] == [expected] * 3
        size.cache.check()


def test_a_small_pool_aborts_tenants_and_guesses_meet(folder: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = [shown(seed, (48, 32)) for seed in range(3)]
    known: dict[str, list[int]] = {}
    with open_llm(
        folder, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=24, max_model_len=None
    ) as llm:
        engine, running = llm.engine, dict[str, tuple[str, Request]]()
        for _ in range(60):
            chosen: list[Any] = [words(1, 12)]
            for _ in range(rng.integers(1, 4)):
                chosen += [pictures[rng.integers(3)], words(int(rng.integers(3)), int(rng.integers(1, 9)))]
            one = request(llm, *chosen, namespace=str(rng.choice(["", "ann"])))
            running[engine.add(one)] = repr(chosen), one
            for _ in range(rng.integers(0, 6)):
                for output in engine.step().finished:
                    name, _ = running.pop(output.request_id)
                    assert known.setdefault(name, tokens(output)) == tokens(output)
                engine.cache.check()
            if running and rng.random() < 0.2:
                engine.abort(rng.choice(list(running)))
        while engine.has_work:
            for output in engine.step().finished:
                if output.outputs[0].finish_reason != "abort":
                    assert known.setdefault(running[output.request_id][0], tokens(output)) == tokens(output)
        engine.cache.check()
    assert len(known) > 20
