"""Who may connect: TLS, its files and its errors, from Python."""

import subprocess

import pytest

import connex_rs


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """Makes certificates that carry logical ids, in a folder of the test's own."""

    def __init__(self, folder):
        self.folder = folder
        self.key, self.cert = folder / "ca.key", folder / "ca.pem"
        openssl(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            str(self.key),
            "-out",
            str(self.cert),
            "-subj",
            "/CN=ca",
            "-days",
            "2",
        )

    def files(self, model, stage):
        name = self.folder / f"{model}-{stage}"
        request, extensions = f"{name}.csr", f"{name}.ext"
        with open(extensions, "w") as out:
            out.write(f"subjectAltName=URI:connex-rs:{model}%7C{stage}%7C0%7C0\n")
        openssl(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            request,
            "-subj",
            "/CN=stage",
        )
        openssl(
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            str(self.cert),
            "-CAkey",
            str(self.key),
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-extfile",
            extensions,
        )
        return f"{name}.pem", f"{name}.key", str(self.cert)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def test_bytes_move_over_tls(authority):
    owner = connex_rs.Engine("tls", 1, listen_ip="127.0.0.1", tls=authority.files("tls", 1))
    reader = connex_rs.Engine("tls", 0, listen_ip="127.0.0.1", tls=authority.files("tls", 0))
    stranger = connex_rs.Engine("tls", 2, listen_ip="127.0.0.1")
    try:
        data = bytes(range(256)) * 4096
        there, here = (
            owner.allocate_managed_buffer(len(data)),
            reader.allocate_managed_buffer(len(data)),
        )
        assert owner.write_bytes_to_buffer(there, data, len(data)) == 0
        assert reader.transfer_sync_read(owner.local_url, here, there, len(data), 20_000) == 0
        assert reader.read_bytes_from_buffer(here, len(data)) == data
        mine = stranger.allocate_managed_buffer(8)
        assert stranger.transfer_sync_read(owner.local_url, mine, there, 8, 20_000) == -2
    finally:
        for engine in (stranger, reader, owner):
            engine.close()


def test_a_certificate_of_somebody_else_is_refused(authority):
    with pytest.raises(ValueError, match=r"tls\|7\|0\|0.*tls\|0\|0\|0"):
        connex_rs.Engine("tls", 0, listen_ip="127.0.0.1", tls=authority.files("tls", 7))


@pytest.mark.parametrize("wrong", [("a", "b"), "files", 7, ("a", "b", 3)])
def test_tls_takes_three_paths(wrong):
    with pytest.raises((TypeError, ValueError), match="tls"):
        connex_rs.Engine("tls", 0, listen_ip="127.0.0.1", tls=wrong)


def test_a_missing_file_is_named(tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ValueError, match=r"none\.pem"):
        connex_rs.Engine("tls", 0, listen_ip="127.0.0.1", tls=(missing, missing, missing))
