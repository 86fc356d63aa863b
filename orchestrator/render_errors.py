"""What renderers and chat templates raise for messages that they can't write."""

from __future__ import annotations

import jinja2

RENDER_ERRORS = (jinja2.TemplateError, LookupError, NotImplementedError, TypeError, ValueError, AssertionError)
