"""The bits of the engine on x86 CPUs that are not at hand: dump_bits on a small Linux in the emulator Bochs.

    python tests/backends/native/kernels/emulate_x86.py --bochs BOCHS --kernel VMLINUZ [--cpu corei7_icelake_u]
        [--cpu arrow_lake] [--isa avx512vnni] ...

BOCHS: built with --enable-evex --with-nogui, in its source folder, whose BIOS it takes; 3.0 or later, as 2.7 states
sizes of register sets that Linux refuses.  VMLINUZ: any kernel with a serial console and an initial RAM disk, such as
that of Debian's linux-image-cloud-amd64.  Also needed: cmake, a C++ compiler with static libraries, cpio, xorriso,
isolinux (Debian: isolinux, syslinux-common).
Every hash must be that of the scalar path here. Exits with 1 if one is not; one JSON line on stdout at the end. Two
minutes a CPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))
from dumped_bits import ROOT, build_dump, hashes_of  # noqa: E402

BOOT_FILES = (Path("/usr/lib/ISOLINUX/isolinux.bin"), Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"))
ISAS = ("avx512vbmi", "avx512vnni", "avx512", "avxvnni")
# What newer kernels use and the emulator or its clock does not carry.
WITHOUT = (
    "umip fsrm erms tsc_deadline_timer rdpid smap smep pku ibt user_shstk rdseed rdrand sha_ni gfni vaes fsgsbase "
    "waitpkg movdiri movdir64b"
)
KERNEL_OPTIONS = (
    "initrd=/initrd.gz console=ttyS0 mitigations=off no_timer_check nohpet lsm=lockdown nopcid noinvpcid no5lvl "
    f"nox2apic random.trust_cpu=off clearcpuid={WITHOUT.replace(' ', ',')}"
)
MACHINE = """display_library: nogui
cpu: model={cpu}, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=256, host=256
romimage: file={bios}/BIOS-bochs-latest
vgaromimage: file={bios}/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0-master: type=cdrom, path={folder}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial
log: {folder}/log
panic: action=fatal
clock: sync=none
"""


def write_image(folder: Path, dump: Path, kernel: Path, isas: list[str]) -> None:
    """folder/boot.iso: the kernel, and a RAM disk with nothing but dump_bits and what starts it."""
    root, iso = folder / "root", folder / "iso"
    for made in (root / "dev", iso / "isolinux"):
        made.mkdir(parents=True)
    init = ROOT / "tests" / "backends" / "native" / "kernels" / "init_of_dump.c"
    subprocess.run(["cc", "-O2", "-static", init, "-o", root / "init"], check=True)
    shutil.copy(dump, root / "dump_bits")
    names = "\n".join(["dev", "init", "dump_bits"]).encode()
    archive = subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names, capture_output=True)
    (iso / "initrd.gz").write_bytes(gzip.compress(archive.stdout, 1))
    shutil.copy(kernel, iso / "vmlinuz")
    for file in BOOT_FILES:
        shutil.copy(file, iso / "isolinux")
    menu = f"DEFAULT a\nPROMPT 0\nLABEL a\n KERNEL /vmlinuz\n APPEND {KERNEL_OPTIONS} -- {' '.join(isas)}\n"
    (iso / "isolinux" / "isolinux.cfg").write_text(menu)
    boot = "-b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table"
    image = f"xorriso -as mkisofs -quiet -o {folder}/boot.iso {boot} {iso}"
    subprocess.run(image.split(), check=True, stdout=sys.stderr)


def emulate(bochs: Path, folder: Path, cpu: str) -> dict[str, dict[str, str]]:
    """{instruction set: {what: hash}} as an emulated CPU gives them."""
    (folder / "serial").unlink(missing_ok=True)
    (folder / "bochsrc").write_text(MACHINE.format(cpu=cpu, bios=bochs.parent / "bios", folder=folder))
    subprocess.run([bochs, "-q", "-f", folder / "bochsrc"], stdout=sys.stderr, timeout=1800)
    lines = (folder / "serial").read_text(errors="replace").splitlines()
    if "END 0" not in lines:
        raise SystemExit(f"{cpu} did not run dump_bits to its end:\n" + "\n".join(lines[-20:]))
    return hashes_of([line for line in lines if line.startswith(ISAS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bochs", type=Path, required=True)
    parser.add_argument("--kernel", type=Path, required=True)
    parser.add_argument("--cpu", action="append", help="a model that BOCHS --help cpu lists")
    parser.add_argument("--isa", action="append", choices=ISAS)
    arguments = parser.parse_args()
    isas = arguments.isa or list(ISAS)
    dump = build_dump("bits-static", "-DCMAKE_EXE_LINKER_FLAGS=-static")
    scalar = subprocess.run([dump, "scalar"], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = hashes_of(scalar)["scalar"]
    equal: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_image(Path(folder), dump, arguments.kernel, isas)
        for cpu in arguments.cpu or ["corei7_icelake_u", "arrow_lake"]:
            found = emulate(arguments.bochs.resolve(), Path(folder), cpu)
            equal[cpu] = {isa: hashes == expected for isa, hashes in found.items()}
    print(json.dumps({"benchmark": "bits on emulated CPUs", "hashes": len(expected), "equal": equal}))
    sys.exit(0 if equal and all(each and all(each.values()) for each in equal.values()) else 1)


if __name__ == "__main__":
    main()
