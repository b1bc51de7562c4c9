"""OpenAI's and Automatic1111's APIs, and the page's own: what clients send, and what they get."""

from __future__ import annotations

import base64
import io
import json
import threading
import time

import pytest
from fakes import FakeDrawer, as_base64, client, drawn, png
from PIL import Image

from rocm_sd.serve import Limits, logs, openai_api, page_api, pictures
from rocm_sd.serve.keys import add_key


@pytest.fixture(scope="module")
def api():
    with client() as made:
        yield made


def red(image):
    return image.convert("RGB").getpixel((0, 0))[0]


def generate(api, **body):
    return api.post("/v1/images/generations", json={"prompt": "a frog", "seed": 7, "steps": 2, **body})


def generation(**body):
    return openai_api.Generation(prompt="a frog", **body)


def test_generations(api):
    answer = generate(api, n=2, size="64x32")
    assert answer.status_code == 200
    said = answer.json()
    assert said["size"] == "64x32"
    pictures = [drawn(one["b64_json"]) for one in said["data"]]
    assert [red(picture) for picture in pictures] == [7, 8]
    assert pictures[0].size == (64, 32)
    facts = json.loads(pictures[0].text["parameters"])
    assert facts["prompt"] == "a frog"
    assert facts["seed"] == 7
    model, drawing = api.drawer.drawings[-1]
    assert model == "small"
    assert drawing.guidance == 3.0, "what suits the model"
    assert drawing.quality == "exact"


@pytest.mark.parametrize(
    ("theirs", "ours"), [("auto", "exact"), ("hd", "exact"), ("high", "exact"), ("medium", "high")]
)
def test_their_words_for_quality(api, theirs, ours):
    assert generate(api, quality=theirs).status_code == 200
    assert api.drawer.drawings[-1][1].quality == ours


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_formats_and_addresses(api, kind):
    said = generate(api, output_format=kind, response_format="url").json()
    answer = api.get(said["data"][0]["url"])
    assert answer.headers["content-type"] == f"image/{kind}"
    assert Image.open(io.BytesIO(answer.content)).format == kind.upper()
    assert api.get("/pictures/nosuch.png").status_code == 404


def test_pictures_on_the_way_are_streamed(api):
    with api.stream(
        "POST",
        "/v1/images/generations",
        json={"prompt": "a frog", "seed": 3, "steps": 6, "stream": True, "partial_images": 2},
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.get("partial_image_index") for event in events] == [0, 1, None]
    assert red(drawn(events[-1]["b64_json"])) == 3


def test_edits_by_mask_by_transparency_and_by_strength(api):
    whole = Image.new("RGB", (64, 64), "blue")
    hole = Image.new("RGBA", (64, 64), (0, 0, 255, 255))
    hole.paste((0, 0, 0, 0), (0, 0, 32, 64))
    form = {"prompt": "a frog", "steps": "2", "seed": "9", "strength": "0.5"}
    for files, task in (
        ({"image": png(whole)}, "image"),
        ({"image": png(hole)}, "inpaint"),
        ({"image": png(whole), "mask": png(hole)}, "inpaint"),
    ):
        sent = {name: (f"{name}.png", raw, "image/png") for name, raw in files.items()}
        answer = api.post("/v1/images/edits", data=form, files=sent)
        assert answer.status_code == 200, answer.text
        drawing = api.drawer.drawings[-1][1]
        assert drawing.task == task
        assert drawing.strength == 0.5
        if task == "inpaint":
            assert drawing.mask.getpixel((0, 0)) == 255, "white is drawn anew"
            assert drawing.mask.getpixel((63, 0)) == 0
    opaque = {"image": ("a.png", png(whole), "image/png"), "mask": ("m.png", png(whole), "image/png")}
    assert api.post("/v1/images/edits", data=form, files=opaque).status_code == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, "prompt"),
        ({"n": 99}, "n:"),
        ({"size": "9x9"}, "multiple of 8"),
        ({"size": "big"}, "WIDTHxHEIGHT"),
        ({"size": "0x64"}, "multiple of 8"),
        ({"size": "4096x4096"}, "pixels"),
        ({"steps": 900}, "steps"),
        ({"model": "nosuch"}, "small, other"),
        ({"scheduler": "magic"}, "euler"),
        ({"prompt": "x" * 5000}, "characters"),
        ({"quality": "low"}, "quality"),
        ({"background": "transparent"}, "opaque"),
        ({"prompt": "\ud800"}, "unicode"),
        ({"guidance": "many"}, "guidance"),
        ({"lora": {"nosuch": 1.0}}, "lora"),
    ],
)
def test_what_cannot_be_drawn_is_said(api, body, words):
    answer = api.post(
        "/v1/images/generations",
        content=json.dumps({"prompt": "a frog", "steps": 2, **body}),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_models_are_listed(api):
    assert [one["id"] for one in api.get("/v1/models").json()["data"]] == ["small", "other"]
    assert [one["model_name"] for one in api.get("/sdapi/v1/sd-models").json()] == ["small", "other"]
    assert api.get("/sdapi/v1/options").json() == {"sd_model_checkpoint": "small"}
    assert {one["name"] for one in api.get("/sdapi/v1/samplers").json()} >= {"Euler a", "DPM++ 2M Karras", "DDIM"}
    assert api.get("/sdapi/v1/schedulers").json()[0]["name"] == "automatic"


def test_txt2img(api):
    body = {
        "prompt": "a frog", "negative_prompt": "blue", "seed": 5, "sampler_name": "DPM++ 2M", "scheduler": "Karras",
        "steps": 2, "cfg_scale": 4, "width": 64, "height": 64, "batch_size": 2, "n_iter": 2, "restore_faces": False,
        "override_settings": {"sd_model_checkpoint": "other"}, "something_new": 1,
    }  # fmt: skip
    said = api.post("/sdapi/v1/txt2img", json=body).json()
    assert [red(drawn(text)) for text in said["images"]] == [5, 6, 7, 8]
    info = json.loads(said["info"])
    assert info["all_seeds"] == [5, 6, 7, 8]
    assert "Sampler: DPM++ 2M" in info["infotexts"][0]
    model, drawing = api.drawer.drawings[-1]
    assert (model, drawing.scheduler, drawing.guidance) == ("other", "dpm++2m-karras", 4)
    assert api.post("/sdapi/v1/txt2img", json={"steps": 1, "seed": -1}).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"enable_hr": True}, "enable_hr"),
        ({"script_name": "x/y plot"}, "script_name"),
        ({"alwayson_scripts": {"ControlNet": {}}}, "ControlNet"),
        ({"sampler_name": "Magic"}, "Euler a"),
        ({"sampler_name": "Euler", "scheduler": "Beta"}, "scheduler"),
        ({"width": 63}, "multiple of 8"),
        ({"override_settings": {"sd_model_checkpoint": "nosuch"}}, "model"),
        ({"eta": 0.5}, "eta 0.5"),
        ({"eta": 0, "sampler_name": "Euler a"}, "eta 0"),
        ({"s_churn": 1}, "s_churn"),
        ({"s_noise": 1.1}, "s_noise"),
        ({"s_tmax": {"\ud800": 1}}, "s_tmax"),
        ({"refiner_checkpoint": "x"}, "refiner_checkpoint"),
        ({"resize_mode": 1}, "resize_mode"),
        ({"inpainting_fill": 2}, "inpainting_fill"),
        ({"mask_blur": 9}, "mask_blur"),
        ({"override_settings": {"CLIP_stop_at_last_layers": 2}}, "CLIP_stop_at_last_layers 2"),
        ({"override_settings": {"nosuch": 1}}, "nosuch"),
        ({"scheduler": "Karras"}, "sampler"),
        ({"prompt": "a <lora:style:1>"}, "lora"),
        ({"prompt": "a <lora:style:x>"}, "WEIGHT"),
        ({"prompt": "a <lora:style:1><lora:style:1>"}, "once"),
        ({"prompt": "a <hypernet:style:1>"}, "hypernet"),
        ({"negative_prompt": "a <lora:style:1>"}, "negative"),
    ],
)
def test_what_would_change_the_picture_is_refused_and_not_left_out(api, body, words):
    content = json.dumps({"steps": 1, **body})
    answer = api.post("/sdapi/v1/txt2img", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert words in answer.json()["detail"]


def test_loras_of_a_prompt_are_used(api):
    body = {
        "prompt": "a frog <lora:style:0.5> in ink",
        "steps": 1,
        "override_settings": {"sd_model_checkpoint": "other"},
    }
    said = api.post("/sdapi/v1/txt2img", json=body).json()
    drawing = api.drawer.drawings[-1][1]
    assert (drawing.prompt, drawing.loras) == ("a frog  in ink", (("style", 0.5),))
    assert json.loads(said["info"])["prompt"] == body["prompt"], "so that it can be asked for again"


def test_what_clients_of_automatic1111_send_for_nothing_passes(api):
    nothing = {
        "eta": 1.0, "s_churn": 0, "s_tmax": 0, "s_tmin": 0, "s_noise": 1, "seed_resize_from_h": 0, "styles": [],
        "seed_resize_from_w": -1, "refiner_checkpoint": "", "refiner_switch_at": 0.8, "hr_scale": 2, "subseed": -1,
        "alwayson_scripts": {}, "override_settings": {"CLIP_stop_at_last_layers": 1, "sd_vae": "Automatic"},
        "override_settings_restore_afterwards": True, "script_args": [], "sampler_name": "Euler a", "scheduler": None,
        "denoising_strength": 0.7, "firstphase_width": 0, "initial_noise_multiplier": 1, "mask_blur": 4,
        "inpaint_full_res": True, "inpainting_fill": 0, "resize_mode": 0, "image_cfg_scale": 1.5, "steps": 2,
    }  # fmt: skip
    assert api.post("/sdapi/v1/txt2img", json=nothing).status_code == 200
    images = {"init_images": [as_base64(Image.new("RGB", (8, 8)))]}
    assert api.post("/sdapi/v1/img2img", json=nothing | images).status_code == 200


def test_a_picture_is_read_beside_the_event_loop(api, monkeypatch):
    read_by = []

    def slow(image, *_rest):
        read_by.append(threading.current_thread())
        return pictures.read(image, Limits())

    monkeypatch.setattr(openai_api, "read", slow)
    sent = {"image": ("a.png", png(Image.new("RGB", (8, 8))), "image/png")}
    assert api.post("/v1/images/edits", data={"prompt": "a frog", "steps": "2"}, files=sent).status_code == 200
    assert "asyncio_" in read_by[0].name, "a thread that the loop has for what blocks"


def test_few_pictures_are_read_at_once(monkeypatch):
    at_once, most, lock = [0], [0], threading.Lock()

    def slow(text, limits):
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.02)
        with lock:
            at_once[0] -= 1
        return pictures.from_base64(text, limits)

    monkeypatch.setattr(page_api, "from_base64", slow)
    body = {"prompt": "a frog", "steps": 2, "image": as_base64(Image.new("RGB", (8, 8)))}
    with client() as api:
        threads = [threading.Thread(target=api.post, args=("/api/jobs",), kwargs={"json": body}) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [2]


@pytest.mark.parametrize("field", [{"lora": '{"style": 0.5}'}, {"lora[style]": "0.5"}])
def test_edits_take_loras_and_refuse_what_is_none(api, field):
    sent = {"image": ("a.png", png(Image.new("RGB", (8, 8))), "image/png")}
    form = {"prompt": "a frog", "steps": "2", "model": "other"}
    assert api.post("/v1/images/edits", data=form | field, files=sent).status_code == 200
    assert api.drawer.drawings[-1][1].loras == (("style", 0.5),)
    for wrong in ({"lora": "style"}, {"lora[style]": "much"}, {"lora": '{"nosuch": 1}'}, {"background": "transparent"}):
        answer = api.post("/v1/images/edits", data=form | wrong, files=sent)
        assert answer.status_code == 400
        assert next(iter(wrong))[:4] in answer.json()["error"]["message"]


def test_compression_0_is_not_what_it_is_if_nothing_is_said():
    assert generation(output_compression=0).compression == 0
    assert generation().compression == generation(output_compression=None).compression == 90


def test_img2img_with_a_mask_and_the_mask_inverted(api):
    image, mask = Image.new("RGB", (64, 64), "blue"), Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    body = {"prompt": "a frog", "steps": 2, "width": 64, "height": 64, "denoising_strength": 0.6, "seed": 1}
    body["init_images"] = ["data:image/png;base64," + as_base64(image)]
    assert api.post("/sdapi/v1/img2img", json=body).status_code == 200
    assert api.drawer.drawings[-1][1].task == "image"
    for invert, left in ((0, 255), (1, 0)):
        given = {**body, "mask": as_base64(mask), "inpainting_mask_invert": invert}
        assert api.post("/sdapi/v1/img2img", json=given).status_code == 200
        drawing = api.drawer.drawings[-1][1]
        assert drawing.task == "inpaint"
        assert drawing.mask.getpixel((0, 0)) == left
    assert api.post("/sdapi/v1/img2img", json={**body, "init_images": []}).status_code == 422


def test_progress_and_interrupt_are_of_ones_own_requests():
    with client(FakeDrawer(step_s=0.01)) as api:
        answers = []
        drawing = threading.Thread(
            target=lambda: answers.append(api.post("/sdapi/v1/txt2img", json={"steps": 140, "width": 64, "height": 64}))
        )
        drawing.start()
        seen = []
        for _ in range(500):
            seen.append(api.get("/sdapi/v1/progress").json())
            if seen[-1]["progress"] > 0 and seen[-1]["current_image"]:
                break
            time.sleep(0.01)
        assert 0 < seen[-1]["progress"] < 1
        assert seen[-1]["state"]["sampling_steps"] == 140
        assert drawn(seen[-1]["current_image"]).size == (8, 8)
        assert api.post("/sdapi/v1/interrupt").status_code == 200
        drawing.join(10)
        assert answers[0].status_code == 409
        assert api.get("/sdapi/v1/progress").json()["progress"] == 0


def events(api, job):
    with api.stream("GET", f"/api/jobs/{job}/events") as answer:
        kind, found = None, []
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                found.append((kind, json.loads(line[6:])))
        return found


def test_the_pages_jobs_are_watched_step_by_step(api):
    body = {"prompt": "a frog", "steps": 4, "n": 2, "seed": 11, "preview_every": 2, "quality": "high"}
    begun = api.post("/api/jobs", json=body)
    assert begun.status_code == 202
    job = begun.json()
    assert job["seeds"] == [11, 12]
    told = events(api, job["id"])
    assert told[-1][0] == "over"
    assert told[-1][1]["state"] == "done"
    pictures = {one["picture"]: one for kind, one in told if kind == "picture"}
    assert {number: one["seed"] for number, one in pictures.items()} == {0: 11, 1: 12}
    assert red(Image.open(io.BytesIO(api.get(pictures[1]["url"]).content))) == 12
    assert pictures[0]["quality"] == "high"
    previews = [one for kind, one in told if kind == "step" and "preview" in one]
    assert all(one["step"] == 2 for one in previews), "not after the last step"
    # Whoever comes late is told of the pictures, too.
    assert {one["picture"] for kind, one in events(api, job["id"]) if kind == "picture"} == {0, 1}
    assert api.get(f"/api/jobs/{job['id']}").json()["progress"] == 1
    assert api.get("/api/status").json()["pictures"] > 0
    info = api.get("/api/info").json()
    assert [one["name"] for one in info["models"]] == ["small", "other"]


def test_a_large_image_is_kept_no_larger_than_what_is_drawn_from_it(api):
    image, mask = Image.new("RGBA", (512, 256), "blue"), Image.new("L", (100, 50), 255)
    body = {"prompt": "a frog", "steps": 2, "width": 16, "height": 8, "init_images": [as_base64(image)]}
    assert api.post("/sdapi/v1/img2img", json=body | {"mask": as_base64(mask)}).status_code == 200
    drawing = api.drawer.drawings[-1][1]
    assert (drawing.image.size, drawing.image.mode, drawing.mask.size, drawing.mask.mode) == (
        (16, 8),
        "RGB",
        (16, 8),
        "L",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_given_leaves_no_picture_behind(api, stream):
    assert generate(api, stream=stream).status_code == 200
    assert list(api.server.service.jobs.values())[-1].image_bytes == 0


def test_listening_again_keeps_no_more_pictures():
    with client(limits=Limits(kept=4)) as api:
        job = api.post("/api/jobs", json={"prompt": "a frog", "steps": 1, "n": 2}).json()["id"]
        told = [[one["url"] for kind, one in events(api, job) if kind == "picture"] for _ in range(5)]
        assert all(sorted(urls) == sorted(told[0]) for urls in told)
        assert len(api.server.kept._kept) == 2
        for _ in range(4):
            api.server.kept.put(b"of others")
        assert [kind for kind, _ in events(api, job)] == ["state", "over"], "its files are not kept any more"


def test_a_job_of_the_page_can_be_ended_and_is_nobody_elses():
    with client(FakeDrawer(step_s=0.01)) as api:
        job = api.post("/api/jobs", json={"prompt": "a frog", "steps": 150}).json()["id"]
        assert api.delete(f"/api/jobs/{job}").status_code == 200
        assert events(api, job)[-1][1]["state"] == "cancelled"
        api.server.service.jobs[job].client = "somebody else"
        assert api.get(f"/api/jobs/{job}").status_code == 404
        assert api.post("/api/jobs", json={"prompt": "x", "colour": "red"}).status_code == 422


def test_a_full_queue_is_answered_politely():
    drawer = FakeDrawer()
    drawer.held.set()
    with client(drawer, limits=Limits(in_flight=1, queue=2)) as api:
        for _ in range(3):
            assert api.post("/api/jobs", json={"prompt": "x", "steps": 2}).status_code in {202, 429}
            time.sleep(0.05)
        answer = generate(api, n=2)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        drawer.held.clear()


def test_a_request_that_takes_too_long_is_ended():
    with client(FakeDrawer(step_s=0.05), limits=Limits(seconds=0.2)) as api:
        answer = generate(api, steps=150)
        assert answer.status_code == 504


@pytest.mark.parametrize("keyed", [True, False], ids=["with keys", "without"])
def test_a_drawer_that_fails_is_the_servers_fault_and_the_next_request_is_fine(tmp_path, keyed):
    """Its own words are for whoever is at the machine, as all are where there are no keys."""
    keys = tmp_path / "keys.txt" if keyed else None
    key = add_key(keys, "ann") if keyed else ""
    with client(FakeDrawer(fail=lambda drawing, _step: drawing.seed == 1), keys=keys) as api:
        api.headers["x-api-key"] = key
        answer = generate(api, seed=1)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-request-id"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        job = api.post("/api/jobs", json={"prompt": "a frog", "seed": 1, "steps": 1}).json()["id"]
        streamed = generate(api, seed=1, stream=True).text
        for said in (answer.json()["error"]["message"], streamed, events(api, job)[-1][1]["error"]):
            assert "The server failed" in said
            assert ("fell out" in said) is not keyed
        assert generate(api, seed=2).status_code == 200


def test_an_error_that_nobody_foresaw_is_answered_as_all_are(monkeypatch):
    with client(raises=True) as api:
        monkeypatch.setattr(api.server, "service", object())
        answer = api.get("/api/status", headers={"x-request-id": "mine"})
        assert answer.status_code == 500
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-content-type-options"] == "nosniff"
        monkeypatch.undo()


def test_lines_of_a_job_have_the_id_of_its_request(api, caplog, monkeypatch):
    monkeypatch.setattr(logs.log, "propagate", True)
    caplog.set_level("INFO", logs.log.name)
    body = {"prompt": "a frog", "steps": 1}
    assert api.post("/v1/images/generations", json=body, headers={"x-request-id": "mine"}).status_code == 200
    lines = {line.getMessage(): line for line in caplog.records if getattr(line, "request", "") == "mine"}
    assert lines.keys() >= {"queued", "over", "answered"}
    assert lines["queued"].job == lines["over"].job


def test_a_picture_says_which_loras_it_was_drawn_with(api):
    made = drawn(generate(api, model="other", lora={"style": 0.5}).json()["data"][0]["b64_json"])
    assert json.loads(made.text["parameters"])["loras"] == {"style": 0.5}


def test_what_is_switched_off_is_not_written_into_the_picture():
    with client(metadata=False) as api:
        assert not drawn(generate(api).json()["data"][0]["b64_json"]).info


def test_the_schema_names_every_endpoint(api):
    paths = api.get("/openapi.json").json()["paths"]
    for path in ("/v1/images/generations", "/v1/images/edits", "/sdapi/v1/txt2img", "/sdapi/v1/img2img",
                 "/sdapi/v1/progress", "/sdapi/v1/interrupt", "/sdapi/v1/samplers", "/sdapi/v1/sd-models",
                 "/healthz", "/readyz", "/metrics"):  # fmt: skip
        assert path in paths


def test_base64_is_held_to_what_it_is(api):
    for text in (
        "http://127.0.0.1/x.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "not base64",
        base64.b64encode(b"x").decode(),
    ):
        body = {"prompt": "a frog", "steps": 1, "init_images": [text]}
        assert api.post("/sdapi/v1/img2img", json=body).status_code == 422
