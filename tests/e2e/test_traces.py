"""OpenTelemetry: one trace of a request over all processes, below the client's span; a collector that is slow,
away or rude harms nothing."""
import http.server
import json
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test, wait_until

PROMPT = "The lighthouse keeper wrote a letter about the storm of that winter. " * 12
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ABOVE = "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP as JSON, and keeps the spans; or does what else it is told."""

    def __init__(self):
        self.spans = []
        self.types = set()
        self.status = 200
        self.hold = threading.Event()  # while it is clear, nothing is answered
        self.hold.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.hold.wait(60)
                outer.types.add((self.path, self.headers["Content-Type"]))
                if outer.status == 200:
                    outer.take(json.loads(body))
                try:
                    self.send_response(outer.status)
                    self.send_header("Content-Length", "2")
                    self.end_headers()
                    self.wfile.write(b"{}")
                except OSError:
                    pass  # who asked did not wait so long

            def log_message(self, *_):
                pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request):
        for resource in request["resourceSpans"]:
            of = {a["key"]: a["value"]["stringValue"] for a in resource["resource"]["attributes"]}
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    values = {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}
                    self.spans.append({**span, "service": of["service.name"],
                                       "instance": of["service.instance.id"], "values": values,
                                       "begin": int(span["startTimeUnixNano"]),
                                       "end": int(span["endTimeUnixNano"])})

    def of(self, trace):
        return [span for span in list(self.spans) if span["traceId"] == trace]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()


def traced(collector, options, **more):
    flags = ["--otlp-endpoint", collector.url]
    return Cluster(options.bin, prefill_args=[*flags, "--chunk-tokens", "64"], decode_args=flags,
                   router_args=[*flags, *more.pop("router_args", [])], **more)


def names_of(spans):
    return sorted(span["name"] for span in spans)


@test
def test_one_trace_goes_through_all_processes(options):
    with Collector() as collector, traced(collector, options) as c:
        answer = c.complete(PROMPT, max_tokens=8, ignore_eos=True, headers={
            "traceparent": f"00-{TRACE}-{ABOVE}-01", "x-request-id": "traced"})
        wanted = ["POST /v1/completions", "decode", "generate", "place", "prefill", "stream", "tokenize",
                  "transfer"]

        def complete():
            names = names_of(collector.of(TRACE))
            return set(wanted) <= set(names)
        wait_until(complete, 20, "all of its spans have come")
        spans = collector.of(TRACE)
        by_name = {span["name"]: span for span in spans}
        chunks = [span for span in spans if span["name"] == "prefill chunk"]
        assert sorted(set(names_of(spans))) == sorted([*wanted, "prefill chunk"]), names_of(spans)
        assert len(spans) == len(wanted) + len(chunks)
        # Who stands below whom, and in which process.
        root = by_name["POST /v1/completions"]
        assert root["parentSpanId"] == ABOVE and root["kind"] == 2
        for name, above, service in (
                ("tokenize", root, "tandem-router"), ("place", root, "tandem-router"),
                ("stream", root, "tandem-router"), ("prefill", root, "tandem-prefill"),
                ("decode", root, "tandem-decode"), ("transfer", by_name["decode"], "tandem-decode"),
                ("generate", by_name["decode"], "tandem-decode")):
            span = by_name[name]
            assert span["parentSpanId"] == above["spanId"] and span["service"] == service, span
        assert all(chunk["parentSpanId"] == by_name["prefill"]["spanId"] for chunk in chunks)
        assert len({span["spanId"] for span in spans}) == len(spans)
        # What they say.
        prompt_tokens = answer.usage["prompt_tokens"]
        assert sum(int(chunk["values"]["tandem.rows"]) for chunk in chunks) == prompt_tokens
        assert len(chunks) >= prompt_tokens // 64
        assert root["values"]["gen_ai.usage.input_tokens"] == str(prompt_tokens)
        assert root["values"]["gen_ai.usage.output_tokens"] == "8"
        assert root["values"]["http.response.status_code"] == "200"
        assert root["values"]["tandem.request"] == "traced"
        assert by_name["place"]["values"]["tandem.prefill"] == by_name["prefill"]["instance"]
        assert by_name["generate"]["values"]["tandem.tokens"] == "8"
        assert int(by_name["transfer"]["values"]["tandem.blocks"]) > 0
        for span in spans:
            assert span["begin"] <= span["end"] and span["status"]["code"] == 0, span
        assert root["begin"] <= by_name["tokenize"]["begin"] <= by_name["place"]["end"]
        assert by_name["prefill"]["begin"] <= chunks[0]["begin"] <= by_name["stream"]["begin"]
        assert "lighthouse" not in json.dumps(spans)
        assert collector.types == {("/v1/traces", "application/json")}
        # A request that failed says so.
        c.request("POST", "/v1/completions", {"model": c.model, "prompt": PROMPT, "max_tokens": -3},
                  headers={"traceparent": f"00-{TRACE[::-1]}-{ABOVE}-01"})
        wait_until(lambda: len(collector.of(TRACE[::-1])) == 2, 20, "a refusal is traced")
        refused = {span["name"]: span for span in collector.of(TRACE[::-1])}
        assert refused["POST /v1/completions"]["status"]["code"] == 2
        assert refused["POST /v1/completions"]["values"]["http.response.status_code"] == "400"


@test
def test_what_is_not_sampled_leaves_no_span(options):
    with Collector() as collector, \
            traced(collector, options, router_args=["--trace-percent", "0"], kvstore=0) as c:
        for parent in (None, f"00-{TRACE}-{ABOVE}-00", "00-garbage", "\xff" * 55, f"00-{'0' * 32}-{ABOVE}-01"):
            headers = {"traceparent": parent} if parent else {}
            assert c.complete("Hi", max_tokens=2, headers=headers).status == 200
        # The last one is sampled: had there been spans of those before, they would have come first.
        c.complete("Hi", max_tokens=2, headers={"traceparent": f"00-{TRACE}-{ABOVE}-01"})
        wait_until(lambda: "POST /v1/completions" in names_of(collector.of(TRACE)), 20, "it has come")
        assert collector.of(TRACE) == collector.spans, collector.spans


@test
def test_a_collector_that_is_no_good_harms_nothing(options):
    with Collector() as collector, traced(collector, options, kvstore=0) as c:
        expected = c.complete(PROMPT, max_tokens=6, temperature=0).text

        def dropped():
            return c.metrics()["tandem_router_spans_dropped_total"]

        def serves():
            assert c.complete(PROMPT, max_tokens=6, temperature=0).text == expected
        collector.status = 503
        serves()
        wait_until(lambda: dropped() > 0, 20, "what it refuses is dropped")
        collector.status = 200
        collector.hold.clear()  # it takes connections, and says nothing
        before = dropped()
        for _ in range(5):
            serves()
        wait_until(lambda: dropped() > before, 20, "what it does not answer is dropped")
        collector.hold.set()
        trace = TRACE[:-1] + "7"

        def back():
            c.complete("Hi", max_tokens=1, headers={"traceparent": f"00-{trace}-{ABOVE}-01"})
            return collector.of(trace)
        wait_until(back, 20, "spans come again")
        collector.server.shutdown()
        collector.server.server_close()
        before = dropped()
        serves()
        wait_until(lambda: dropped() > before, 20, "nobody is there any more")
        serves()
        c.wait_at_rest()


if __name__ == "__main__":
    main(__doc__)
