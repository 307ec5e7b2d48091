"""Chat templates of strangers: each ends in time and in little memory, with one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from smallgpt_jax.data import template_process
from smallgpt_jax.data.chat_template import ChatTemplate

pytest.importorskip("jinja2")

QUESTION = [{"role": "user", "content": "why?"}]


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ 'a' * 6000000000 }}", "needs more than 2 GiB of memory"),
        ("{{ 'a' | center(6000000000) }}", "needs more than 2 GiB of memory"),
        ("{{ '%6000000000d' % 1 }}", "needs more than 2 GiB of memory"),
        ("{{ range(99999) | list * 99999 }}", "needs more than 2 GiB of memory"),
        ("{{ 'aaaaaaa' * 10000000 }}", "writes more than 67,108,864 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "maximum recursion depth exceeded"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ raise_exception('two\nlines') }}", "two"),
        ("{{ messages.clear() }}", "access to attribute 'clear' of 'list' object is unsafe."),
        ("{{ 'a'", "unexpected end of template, expected 'end of print statement'."),
    ],
)
def test_harmful_templates_are_refused_in_one_line(source, message):
    with pytest.raises(ValueError) as refused:
        ChatTemplate(source).render(QUESTION)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
    assert ChatTemplate("{{ messages[0].content }}").render(QUESTION) == "why?"


def test_an_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.2)
    loop = "{% for i in range(99999) %}"
    with pytest.raises(ValueError, match=r"takes longer than 0\.2 seconds"):
        ChatTemplate(loop * 2 + "{% endfor %}" * 2).render(QUESTION)
    monkeypatch.undo()  # a new process imports Jinja
    assert ChatTemplate("{{ messages[0].content }}").render(QUESTION) == "why?"


def test_a_template_gets_the_conversation_as_it_is():
    """Values that JSON has not are written as text, as by Jinja."""
    messages = [
        {"role": "user", "content": "ü \ud800 \n\U0001f600", "date": os},
        {"role": "tool", "content": "", "calls": [{"x": 1.5, "y": None, "z": True}]},
    ]
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}|{{ m.calls }}|{{ m.date }};{% endfor %}"
    )
    assert template.render(messages) == (
        f"ü \ud800 \n\U0001f600||{os};|[{{'x': 1.5, 'y': None, 'z': True}}]|;"
    )
    with pytest.raises(ValueError, match=r"U\+FDD0, which marks answers"):
        template.render([{"role": "user", "content": "", "calls": [{"x": "\ufdd0"}]}])
    nested = []
    for _ in range(50_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        template.render([{"role": "user", "content": "", "calls": nested}])


def test_the_process_ends_with_its_parent_and_ignores_ctrl_c():
    program = f"""
import os
from smallgpt_jax.data import template_process
template_process.render("", "[]", [(0, True, None)], {{}})
process = template_process._renderer(os.getpid())._process
os.kill(process.pid, {int(signal.SIGINT)})
assert template_process.render("a", "[]", [(0, True, None)], {{}}) == ["a"]
assert process is template_process._renderer(os.getpid())._process
print(process.pid)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(done.stdout), 0)
            time.sleep(0.05)
