"""What Schemathesis does otherwise for our sake; it loads this file itself (SCHEMATHESIS_HOOKS)."""
import schemathesis

FEW = {"max_tokens": 2, "max_completion_tokens": 2, "n": 2}


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Answers stay short. A number that is out of its range stays what it is."""
    body = case.body
    for name, few in FEW.items() if isinstance(body, dict) else ():
        value = body.get(name)
        if isinstance(value, int) and few < value <= (16 if name == "n" else 2 ** 32 - 1):
            body[name] = few


@schemathesis.hook
def filter_case(_context, case):
    """Headers that nobody knows are no mistake of the client's."""
    return not any("unknown-property" in name for name in case.headers or {})
