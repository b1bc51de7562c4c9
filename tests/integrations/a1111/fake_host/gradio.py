"""Components that remember what they were made with."""

from __future__ import annotations


class Component:
    def __init__(self, value=None, **named):
        self.value, self.named = named.pop("value", value), named

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None

    def click(self, **named):
        self.clicked = named


class Accordion(Component):
    pass


class Checkbox(Component):
    pass


class Radio(Component):
    def __init__(self, choices=None, **named):
        super().__init__(**named)
        self.choices = choices


class Textbox(Component):
    pass


class HTML(Component):
    pass


class Button(Component):
    pass
