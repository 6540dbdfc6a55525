//! Programs: facts, raw loading of tiny helpers, test runs with a context.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use super::{Command, bpf, fd_by_id, name_text, object_info, object_name, owned};

/// What the kernel says about a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProgFacts {
    /// Kernel id.
    pub id: u32,
    /// Hash of its instructions without map numbers.
    pub tag: [u8; 8],
    /// Ids of the maps that it uses.
    pub map_ids: Vec<u32>,
    /// First 15 bytes of its name.
    pub name: String,
}

#[repr(C)]
#[derive(Default)]
struct KernelProgInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_len: u32,
    xlated_len: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: [u8; 16],
}

/// Facts of a program.
///
/// # Errors
/// When the descriptor is no program.
pub fn prog_facts(fd: BorrowedFd<'_>) -> io::Result<ProgFacts> {
    let mut ids = vec![0u32; 64];
    let mut info = KernelProgInfo {
        nr_map_ids: ids.len() as u32,
        map_ids: ids.as_mut_ptr() as u64,
        ..KernelProgInfo::default()
    };
    // SAFETY: the struct is the prefix of `struct bpf_prog_info`; `map_ids` points at `nr_map_ids` integers, the other lengths are 0.
    unsafe { object_info(fd, &mut info) }?;
    if info.nr_map_ids as usize > ids.len() {
        return Err(io::Error::other("a program uses more than 64 maps"));
    }
    ids.truncate(info.nr_map_ids as usize);
    Ok(ProgFacts { id: info.id, tag: info.tag, map_ids: ids, name: name_text(&info.name) })
}

/// Opens a program by its kernel id.
///
/// # Errors
/// `NotFound` when it is gone.
pub fn prog_by_id(id: u32) -> io::Result<OwnedFd> {
    fd_by_id(Command::ProgById, id)
}

/// One instruction as the kernel takes it (`struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Insn {
    /// Operation.
    pub code: u8,
    /// Destination register, source register in the upper half.
    pub regs: u8,
    /// Offset.
    pub off: i16,
    /// Immediate.
    pub imm: i32,
}

#[repr(C)]
#[derive(Default)]
struct LoadAttr {
    kind: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach_type: u32,
}

/// `BPF_PROG_TYPE_SYSCALL`.
const KIND_SYSCALL: u32 = 31;
/// `BPF_F_SLEEPABLE`, which programs of that type must set.
const SLEEPABLE: u32 = 1 << 4;

/// Loads a program of type `syscall`, run only by [`test_run_syscall`].
///
/// # Errors
/// When the verifier refuses; the message carries its log.
pub fn prog_load(name: &str, insns: &[Insn]) -> io::Result<OwnedFd> {
    let attr = LoadAttr {
        kind: KIND_SYSCALL,
        log_level: 1,
        prog_flags: SLEEPABLE,
        name: object_name(name),
        ..LoadAttr::default()
    };
    load(attr, insns).map(|(fd, _)| fd)
}

/// `BPF_LOG_STATS`.
const LOG_STATS: u32 = 4;

/// What the verifier says of a program that it takes: its statistics, a line of text. The program is dropped.
///
/// # Errors
/// When the verifier refuses.
pub fn prog_statistics(kind: u32, expected_attach_type: u32, insns: &[Insn]) -> io::Result<String> {
    load(LoadAttr { kind, expected_attach_type, log_level: LOG_STATS, ..LoadAttr::default() }, insns)
        .map(|(_, log)| log)
}

/// The program, and the verifier's log.
fn load(mut attr: LoadAttr, insns: &[Insn]) -> io::Result<(OwnedFd, String)> {
    let mut log = vec![0u8; 16 * 1024];
    attr.insn_cnt = insns.len() as u32;
    attr.insns = insns.as_ptr() as u64;
    attr.license = c"GPL".as_ptr() as u64;
    attr.log_size = log.len() as u32;
    attr.log_buf = log.as_mut_ptr() as u64;
    // SAFETY: instructions, licence and log buffer live over the call and have the lengths given.
    let loaded = unsafe { bpf(Command::ProgLoad, &mut attr) };
    let end = log.iter().position(|b| *b == 0).unwrap_or(0);
    let log = String::from_utf8_lossy(&log[..end]).into_owned();
    match loaded {
        Ok(fd) => Ok((owned(fd)?, log)),
        Err(e) => Err(io::Error::new(e.kind(), format!("{e}: {log}"))),
    }
}

#[repr(C)]
#[derive(Default)]
struct RunAttr {
    fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// The fields of `struct __sk_buff` that a test run may set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunContext {
    /// `skb->mark`.
    pub mark: u32,
    /// Device the packet came from; 0 = none.
    pub ingress_ifindex: u32,
    /// Device the program runs on; must exist in the caller's network namespace. 0 = loopback.
    pub ifindex: u32,
    /// Control block.
    pub cb: [u32; 5],
    /// Segments of a GSO packet.
    pub gso_segs: u32,
    /// Segment size of a GSO packet.
    pub gso_size: u32,
}

/// What a test run gave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunResult {
    /// The program's return value (`TC_ACT_*`, `TCX_*`).
    pub action: i32,
    /// The packet afterwards.
    pub data: Vec<u8>,
    /// The context afterwards.
    pub context: RunContext,
    /// Average time of one run, nanoseconds.
    pub duration_ns: u32,
}

/// Words of `struct __sk_buff` (192 bytes).
const SKB_WORDS: usize = 48;
const SKB_MARK: usize = 2;
const SKB_INGRESS_IFINDEX: usize = 9;
const SKB_IFINDEX: usize = 10;
const SKB_CB: usize = 12;
const SKB_GSO_SEGS: usize = 41;
const SKB_GSO_SIZE: usize = 44;

/// Room that a program may add in front of the packet.
const HEADROOM: usize = 256;

/// Runs a classifier on a frame (`BPF_PROG_TEST_RUN`), `repeat` times (0 counts as 1).
///
/// # Errors
/// `EINVAL` for frames that the kernel refuses (shorter than an Ethernet header, or 34 bytes for IPv4), `ENODEV`/`EINVAL` for an unknown ifindex.
pub fn test_run(
    prog: BorrowedFd<'_>,
    frame: &[u8],
    context: &RunContext,
    repeat: u32,
) -> io::Result<RunResult> {
    let mut skb = [0u32; SKB_WORDS];
    skb[SKB_MARK] = context.mark;
    skb[SKB_INGRESS_IFINDEX] = context.ingress_ifindex;
    skb[SKB_IFINDEX] = context.ifindex;
    skb[SKB_CB..SKB_CB + 5].copy_from_slice(&context.cb);
    skb[SKB_GSO_SEGS] = context.gso_segs;
    skb[SKB_GSO_SIZE] = context.gso_size;
    let mut skb_out = [0u32; SKB_WORDS];
    let mut data = vec![0u8; frame.len() + HEADROOM];
    let mut attr = RunAttr {
        fd: prog.as_raw_fd() as u32,
        data_size_in: frame.len() as u32,
        data_size_out: data.len() as u32,
        data_in: frame.as_ptr() as u64,
        data_out: data.as_mut_ptr() as u64,
        repeat: repeat.max(1),
        ctx_size_in: std::mem::size_of_val(&skb) as u32,
        ctx_size_out: std::mem::size_of_val(&skb_out) as u32,
        ctx_in: skb.as_ptr() as u64,
        ctx_out: skb_out.as_mut_ptr() as u64,
        ..RunAttr::default()
    };
    // SAFETY: all four buffers live over the call and have the sizes given.
    unsafe { bpf(Command::ProgTestRun, &mut attr) }?;
    data.truncate(attr.data_size_out as usize);
    let mut cb = [0; 5];
    cb.copy_from_slice(&skb_out[SKB_CB..SKB_CB + 5]);
    Ok(RunResult {
        action: attr.retval as i32,
        data,
        context: RunContext {
            mark: skb_out[SKB_MARK],
            ingress_ifindex: skb_out[SKB_INGRESS_IFINDEX],
            ifindex: skb_out[SKB_IFINDEX],
            cb,
            gso_segs: skb_out[SKB_GSO_SEGS],
            gso_size: skb_out[SKB_GSO_SIZE],
        },
        duration_ns: attr.duration,
    })
}

/// Runs a program of type `syscall` on `context`, which it may read and write. Returns its return value.
///
/// # Errors
/// Whatever the kernel says.
pub fn test_run_syscall(prog: BorrowedFd<'_>, context: &mut [u32]) -> io::Result<u32> {
    let mut attr = RunAttr {
        fd: prog.as_raw_fd() as u32,
        ctx_size_in: std::mem::size_of_val(context) as u32,
        ctx_in: context.as_mut_ptr() as u64,
        ..RunAttr::default()
    };
    // SAFETY: the context lives over the call and has the size given; the kernel copies it in and back.
    unsafe { bpf(Command::ProgTestRun, &mut attr) }?;
    Ok(attr.retval)
}
