"""The queue: turns among clients, room, deadlines, cancelling, failures and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from fakes import FakeDrawer
from PIL import Image

from rocm_sd.integrations.diffusers import Drawing
from rocm_sd.serve import Busy, Cancelled, Job, Limits, Service, TooLate
from rocm_sd.serve.jobs import Ending
from rocm_sd.serve.metrics import Metrics


class OneAtATime(FakeDrawer):
    """Of those that are not exact it draws one after the other."""

    def lanes(self, _model, quality):
        return None if quality == "exact" else 1


@pytest.fixture
def service():
    made = []

    def make(drawer=None, **limits):
        made.append(Service(drawer or FakeDrawer(), Limits(**{"in_flight": 2, "queue": 8, **limits}), Metrics()))
        return made[-1]

    yield make
    for one in made:
        one.drawer.held.clear()
        one.close()


def job(client="a", count=1, steps=2, quality="exact", **more):
    drawing = Drawing("x", steps=steps, width=8, height=8, quality=quality)
    return Job("small", tuple(replace(drawing, seed=i) for i in range(count)), client, **more)


def wait(*jobs, seconds=10):
    ends = time.monotonic() + seconds
    while not all(one.is_over for one in jobs):
        assert time.monotonic() < ends, [one.state for one in jobs]
        time.sleep(0.002)


def until(true, seconds=10):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.002)


def test_pictures_are_drawn_and_counted(service):
    one = service()
    asked = one.submit(job(count=3))
    wait(asked)
    assert asked.state == "done"
    assert [image.getpixel((0, 0))[0] for image in asked.images] == [0, 1, 2]
    assert asked.progress == 1
    assert one.drawn == 3
    assert one.seconds_a_picture() is not None
    text = one.metrics.text().decode()
    assert 'rocm_sd_pictures_total{model="small"} 3.0' in text
    assert "rocm_sd_queue_pictures 0.0" in text


def test_no_more_are_drawn_at_once_than_there_is_room_for(service):
    one = service(FakeDrawer(step_s=0.01), in_flight=3)
    asked = [one.submit(job(client=str(i), count=2)) for i in range(4)]
    wait(*asked)
    assert one.drawer.most_at_once == 3


def test_clients_take_turns(service):
    drawer = FakeDrawer()
    drawer.held.set()
    one = service(drawer, in_flight=1, queue=20)
    first = one.submit(job("eager"))
    until(lambda: drawer.drawings)
    eager = [one.submit(job("eager", steps=3)) for _ in range(4)]
    patient = [one.submit(job("patient", steps=4)) for _ in range(2)]
    drawer.held.clear()
    wait(first, *eager, *patient)
    assert [drawing.steps for _, drawing in drawer.drawings] == [2, 3, 4, 3, 4, 3, 3]


def test_who_waits_for_its_like_lets_others_pass(service):
    drawer = OneAtATime()
    drawer.held.set()
    one = service(drawer, in_flight=3, queue=20)
    high = [one.submit(job("a", quality="high", steps=1)) for _ in range(3)]
    balanced = one.submit(job("b", quality="balanced", steps=2))
    exact = [one.submit(job("a", steps=3)), one.submit(job("c", steps=4))]
    until(lambda: len(drawer.drawings) == 3)
    # Of "high" one is drawn; the place of the second is free for the others.
    assert sorted(drawing.quality for _, drawing in drawer.drawings) == ["balanced", "exact", "high"]
    drawer.held.clear()
    wait(*high, balanced, *exact)
    assert sorted(drawing.steps for _, drawing in drawer.drawings) == [1, 1, 1, 2, 3, 4]
    assert all(each.state == "done" for each in (*high, balanced, *exact))


def test_a_lane_is_free_again_whatever_became_of_its_picture(service):
    drawer = OneAtATime(fail=lambda drawing, _step: drawing.steps == 1)
    one = service(drawer, in_flight=2)
    bad, good = one.submit(job(quality="high", steps=1)), one.submit(job(quality="high"))
    wait(bad, good)
    assert (bad.state, good.state) == ("failed", "done")
    drawer.held.set()
    begun, waiting, last = (one.submit(job(quality="high")) for _ in range(3))
    until(lambda: begun.state == "drawing")
    for each in (begun, waiting):
        one.cancel(each)
    drawer.held.clear()
    wait(begun, waiting, last)
    assert (begun.state, waiting.state, last.state) == ("cancelled", "cancelled", "done")


def test_the_end_waits_for_what_waits_for_its_like(service):
    one = service(OneAtATime(step_s=0.01), in_flight=2)
    asked = [one.submit(job(quality="high")) for _ in range(3)]
    one.close(drain_s=10)
    assert [each.state for each in asked] == ["done"] * 3


def test_a_full_queue_says_when_to_come_again(service):
    drawer = FakeDrawer()
    drawer.held.set()
    one = service(drawer, in_flight=1, queue=3)
    one.submit(job())
    until(lambda: drawer.drawings)
    one.submit(job(count=2))
    with pytest.raises(Busy) as busy:
        one.submit(job(count=2))
    assert busy.value.retry_after >= 1
    one.submit(job(count=1))
    assert "rocm_sd_refused_total 1.0" in one.metrics.text().decode()


def test_what_is_cancelled_stops_at_its_next_step_or_never_begins(service):
    drawer = FakeDrawer(step_s=0.005)
    one = service(drawer, in_flight=1)
    running, waiting, other = one.submit(job(steps=100)), one.submit(job()), one.submit(job())
    until(lambda: running.steps[0] > 1)
    for each in (running, waiting):
        one.cancel(each)
    wait(running, waiting, other)
    assert (running.state, waiting.state, other.state) == ("cancelled", "cancelled", "done")
    assert len(drawer.drawings) == 2
    assert running.steps[0] < 100


def test_what_is_late_fails_while_it_waits_and_while_it_is_drawn(service):
    drawer = FakeDrawer(step_s=0.01)
    one = service(drawer, in_flight=1, seconds=0.2)
    drawn, waiting = one.submit(job(steps=1000)), one.submit(job())
    wait(drawn, waiting)
    assert isinstance(drawn.error, TooLate)
    assert isinstance(waiting.error, TooLate)
    assert time.monotonic() - drawn.created < 5


def test_one_that_fails_does_not_hinder_the_next(service):
    one = service(FakeDrawer(fail=lambda drawing, step: drawing.seed == 1 and step == 2))
    bad, good = one.submit(job(count=3)), one.submit(job())
    wait(bad, good)
    assert bad.state == "failed"
    assert "fell out" in str(bad.error)
    assert good.state == "done"


def test_the_end_lets_what_was_begun_come_to_its_end(service):
    one = service(FakeDrawer(step_s=0.01))
    asked = one.submit(job(count=3, steps=5))
    ending = threading.Thread(target=one.close, args=(10,))
    ending.start()
    until(lambda: one.draining)
    with pytest.raises(Ending, match="The server ends"):
        one.submit(job())
    ending.join(10)
    assert asked.state == "done"
    assert one.drawer.closed


def test_whoever_looks_at_the_queue_does_not_stumble_over_its_changes(service):
    """It is changed where a lock is held, and so it is looked at where one is held."""
    one = service()
    seen = []
    with one._changed:
        looking = threading.Thread(target=lambda: seen.append(one.queued))
        looking.start()
        looking.join(0.2)
        assert not seen
    looking.join(10)
    assert seen == [0]


def test_the_end_does_not_wait_for_ever():
    one = Service(FakeDrawer(step_s=0.01), Limits(in_flight=1), Metrics())
    running, waiting = one.submit(job(steps=10_000)), one.submit(job(steps=10_000))
    until(lambda: running.steps[0])
    one.close(0.1)
    assert (running.state, waiting.state) == ("cancelled", "cancelled")


def test_jobs_that_are_over_are_forgotten_in_time(service):
    one = service(kept=5, queue=50)
    asked = [one.submit(job(str(i))) for i in range(12)]
    wait(*asked)
    one.submit(job())
    assert len(one.jobs) <= 6


def test_events_come_in_their_order_and_late_listeners_are_told(service):
    one = service(FakeDrawer(step_s=0.002))

    async def listen():
        asked = job(count=1, steps=3)
        queue = asked.listen()
        one.submit(asked)
        found = []
        while not found or found[-1].kind != "over":
            found.append(await asyncio.wait_for(queue.get(), 10))
        late = asked.listen()
        assert (await asyncio.wait_for(late.get(), 1)).kind == "over"
        asked.leave(late)
        await asked.over()
        return [(event.kind, event.step) for event in found]

    told = asyncio.run(listen())
    assert told == [("state", 0), ("step", 1), ("step", 2), ("step", 3), ("picture", 0), ("over", 0)]


def test_the_error_of_a_job_is_raised_where_it_is_waited_for(service):
    one = service(FakeDrawer(step_s=0.002))
    asked = one.submit(job(steps=1000))
    one.cancel(asked)
    with pytest.raises(Cancelled):
        asyncio.run(asked.over())


def test_what_a_job_was_drawn_from_is_not_kept_when_it_is_over(service):
    one = service(FakeDrawer(fail=lambda drawing, _step: drawing.seed == 1))
    image, mask = Image.new("RGB", (8, 8)), Image.new("L", (8, 8))
    given = Drawing("x", steps=4, width=8, height=8, image=image, mask=mask, strength=0.5)
    asked = [Job("small", (replace(given, seed=seed),), "a") for seed in (0, 1)]
    for each in asked:
        each.preview = image
        wait(one.submit(each))
    until(lambda: not one.in_flight)
    assert [each.state for each in asked] == ["done", "failed"]
    for each in asked:
        assert [(drawing.image, drawing.mask, each.preview) for drawing in each.drawings] == [(None, None, None)]
        assert each.drawn_steps == (2,)
        assert each.is_from_image


def test_pictures_that_nobody_fetched_are_bounded_by_their_bytes(service):
    each_has = 8 * 8 * 3
    one = service(kept_bytes=2 * each_has)
    for number in range(5):
        wait(one.submit(job(str(number), for_later=True)))
    until(lambda: not one.in_flight)
    assert [made.image_bytes for made in one.jobs.values()] == [0, 0, 0, each_has, each_has]


def test_two_pictures_that_end_at_once_end_their_job_once(service):
    """Whoever is last finds the job done, and nobody else does."""
    for _ in range(200):
        asked, start, found = job(count=2), threading.Barrier(2), []

        def end(number, asked=asked, start=start, found=found):
            start.wait(10)
            found.append(asked.finish(number, Image.new("RGB", (8, 8))))

        threads = [threading.Thread(target=end, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(found) == [False, True]
