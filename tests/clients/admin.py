"""A client of the admin RPC: pyzmq, and classes that protoc makes of proto/admin.proto."""
import glob
import importlib
import os
import subprocess
import sys
import time

import zmq

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GENERATED = os.path.join(ROOT, "build", "gen", "python")


def messages():
    """The module of the RPC's messages, made when it is missing or older than the .proto."""
    source = os.path.join(ROOT, "proto", "admin.proto")
    made = os.path.join(GENERATED, "admin_pb2.py")
    if not os.path.exists(made) or os.path.getmtime(made) < os.path.getmtime(source):
        os.makedirs(GENERATED, exist_ok=True)
        subprocess.run(["protoc", f"--proto_path={os.path.dirname(source)}",
                        f"--python_out={GENERATED}", source], check=True)
    sys.path.insert(0, GENERATED)
    return importlib.import_module("admin_pb2")


class Refused(Exception):
    """The router's answer was no."""

    def __init__(self, reply):
        super().__init__(reply.error)
        self.code = reply.code


class Admin:
    """Asks one router. keys: the folder that --admin-keys names."""

    def __init__(self, keys, secret=None, context=None):
        self.pb = messages()
        self.context = context or zmq.Context.instance()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.secret = secret or self._line(keys, "admin.key")
        self.socket.curve_secretkey = self.secret.encode()
        self.socket.curve_publickey = zmq.curve_public(self.secret.encode())
        self.socket.curve_serverkey = self._line(keys, "router.pub").encode()
        self.socket.connect(self._line(keys, "endpoint"))
        self.next_id = 0

    @staticmethod
    def _line(folder, name):
        with open(os.path.join(folder, name), encoding="ascii") as file:
            return file.readline().strip()

    def close(self):
        self.socket.close()

    def send(self, **command):
        """Sends one command, named as in Request; answers its id."""
        self.next_id += 1
        request = self.pb.Request(id=self.next_id)
        for name, value in command.items():
            getattr(request, name).CopyFrom(value)
        self.socket.send(request.SerializeToString())
        return self.next_id

    def receive(self, seconds=5):
        """The next reply. TimeoutError: none came."""
        if not self.socket.poll(seconds * 1000):
            raise TimeoutError(f"no reply within {seconds} s")
        return self.pb.Reply.FromString(self.socket.recv())

    def ask(self, seconds=5, **command):
        """The answer to one command; Refused when it is no."""
        number = self.send(**command)
        deadline = time.monotonic() + seconds
        while True:
            reply = self.receive(max(0.001, deadline - time.monotonic()))
            if reply.id != number:
                continue  # an event of a subscription
            if reply.code != self.pb.OK:
                raise Refused(reply)
            return getattr(reply, reply.WhichOneof("answer")) if reply.WhichOneof("answer") else None

    def status(self):
        return self.ask(status=self.pb.StatusRequest())

    def nodes(self):
        """{id: Node}"""
        return {node.id: node for node in self.ask(nodes=self.pb.NodesRequest()).nodes}

    def drain(self, node, drained=True):
        self.ask(drain=self.pb.DrainRequest(node=node, drained=drained))

    def store(self, action, **what):
        return self.ask(store=self.pb.StoreRequest(action=action, **what))

    def speculation(self, explore=None):
        request = self.pb.SpeculationRequest()
        if explore is not None:
            request.set = True
            request.explore_percent = explore
        return self.ask(speculation=request)

    def policy(self, name=""):
        return self.ask(policy=self.pb.PolicyRequest(policy=name))

    def slo(self, ttft_ms=None, tbt_ms=None):
        request = self.pb.SloRequest()
        if ttft_ms is not None:
            request.set_ttft, request.ttft_ms = True, ttft_ms
        if tbt_ms is not None:
            request.set_tbt, request.tbt_ms = True, tbt_ms
        return self.ask(slo=request)

    def tenants(self):
        """{name: Tenant}"""
        return {each.name: each for each in self.ask(tenants=self.pb.TenantsRequest()).tenants}

    def calibration(self):
        return self.ask(calibration=self.pb.CalibrationRequest())

    def trace(self, request="", most=0):
        return self.ask(trace=self.pb.TraceRequest(request=request, most=most)).decisions

    def subscribe(self, since=0, lease_ms=0):
        return self.ask(subscribe=self.pb.SubscribeRequest(since=since, lease_ms=lease_ms))


def keys_of(cluster):
    """Where a cluster of the tests has its keys."""
    found = glob.glob(os.path.join(cluster.run_dir, "admin", "router.pub"))
    assert found, "the router has made its keys"
    return os.path.dirname(found[0])
