//! What each program costs: instructions and verifier work from the kernel, stack from the object.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _};

use anyhow::{Context as _, Result, bail, ensure};
use flowloom_datapath::SocketHook;
use flowloom_datapath::sys::{Insn, prog_statistics};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SymbolKind};

use crate::programs::{PROGRAMS, Programs, SOCKET_PROGRAMS};

/// Instructions the verifier may look at (`BPF_COMPLEXITY_LIMIT_INSNS`).
const VERIFIER_LIMIT: u32 = 1_000_000;
/// Bytes of stack that a program and what it calls may have (`MAX_BPF_STACK`).
const STACK_LIMIT: u32 = 512;
/// No program may need more than half of what the verifier takes: other kernels look at more.
const BUDGET: u32 = VERIFIER_LIMIT / 2;

/// What the verifier walked when this was written, and half as much again: another compiler, another kernel. Raise a number only with what it pays for.
const RECORDED: [(&str, u32); 14] = [
    ("from_endpoint", 104_000),
    ("to_endpoint", 97_000),
    ("from_overlay", 143_000),
    ("to_overlay", 13_000),
    ("from_uplink", 121_000),
    ("to_uplink", 12_000),
    ("connect4", 19_000),
    ("connect6", 20_000),
    ("sendmsg4", 25_000),
    ("sendmsg6", 25_000),
    ("recvmsg4", 1_000),
    ("recvmsg6", 1_000),
    ("getpeername4", 1_000),
    ("getpeername6", 1_000),
];

/// One program's cost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cost {
    /// Its name.
    pub name: String,
    /// Instructions after the verifier's rewrites.
    pub instructions: u32,
    /// Instructions that the verifier walked.
    pub verified: u32,
    /// States that the verifier kept, over all of that walk.
    pub states: u32,
    /// Bytes of machine code.
    pub machine_code: u32,
    /// Bytes of stack of the deepest chain of calls.
    pub stack: u32,
}

/// Loads the programs and measures them.
///
/// # Errors
/// When there is no object, or the kernel refuses it.
pub fn measure() -> Result<Vec<Cost>> {
    let stacks = Stacks::of(flowloom_bpf_object::object()?)?;
    let mut programs = Programs::load(false)?;
    let states = states(&programs)?;
    PROGRAMS
        .iter()
        .chain(&SOCKET_PROGRAMS)
        .map(|name| {
            let info = programs.info(name)?;
            let verified = info
                .verified_instruction_count()
                .context("this kernel does not count verified instructions")?;
            let (walked, states) =
                states.get(*name).copied().with_context(|| format!("{name}: no states"))?;
            ensure!(walked == verified, "{name}: walked {walked} instructions alone, {verified} when loaded");
            Ok(Cost {
                name: (*name).to_owned(),
                instructions: info.size_translated().unwrap_or(0) / 8,
                verified,
                states,
                machine_code: info.size_jitted(),
                stack: stacks.of_program(name)?,
            })
        })
        .collect()
}

/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;
/// `BPF_PROG_TYPE_CGROUP_SOCK_ADDR`.
const SOCKET_ADDRESS: u32 = 18;

/// Instructions walked and states kept, per program. Only its log tells them, and the loader keeps none of a program that is taken: each is loaded once more.
fn states(loaded: &Programs) -> Result<BTreeMap<String, (u32, u32)>> {
    let mut object = aya_obj::Object::parse(flowloom_bpf_object::object()?)?;
    let declared = object.maps.clone();
    let maps = loaded.ebpf.maps().map(|(name, map)| {
        let fd = map_fd(map).with_context(|| format!("{name}: a kind of map that no program has yet"))?;
        Ok((name, fd, declared.get(name).with_context(|| format!("{name} is not in the object"))?))
    });
    let maps = maps.collect::<Result<Vec<_>>>()?;
    let text = object.functions.keys().map(|(section, _)| *section).collect();
    object.relocate_maps(maps.into_iter(), &text)?;
    object.relocate_calls(&text)?;
    let mut states = BTreeMap::new();
    for (name, program) in &object.programs {
        let function = &object.functions[&program.function_key()];
        let insns: Vec<Insn> = function
            .instructions
            .iter()
            .map(|i| Insn { code: i.code, regs: i.src_reg() << 4 | i.dst_reg(), off: i.off, imm: i.imm })
            .collect();
        let (kind, attach) = match SocketHook::from_name(name) {
            Some(hook) => (SOCKET_ADDRESS, hook.attach_type()),
            None => (CLASSIFIER, 0),
        };
        let log = prog_statistics(kind, attach, &insns).with_context(|| format!("verifying {name}"))?;
        let told =
            |word: &str| log.split_once(word).and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        let (Some(walked), Some(total)) = (told("processed "), told("total_states ")) else {
            bail!("{name}: the verifier tells no states: {log}");
        };
        states.insert(name.clone(), (walked, total));
    }
    Ok(states)
}

fn map_fd(map: &aya::maps::Map) -> Option<i32> {
    use aya::maps::Map;
    let data = match map {
        Map::Array(d)
        | Map::PerCpuArray(d)
        | Map::HashMap(d)
        | Map::LruHashMap(d)
        | Map::PerCpuHashMap(d)
        | Map::PerCpuLruHashMap(d)
        | Map::LpmTrie(d)
        | Map::HashOfMaps(d)
        | Map::ArrayOfMaps(d)
        | Map::RingBuf(d) => d,
        _ => return None,
    };
    Some(data.fd().as_fd().as_raw_fd())
}

/// A table for people.
#[must_use]
pub fn table(costs: &[Cost]) -> String {
    let mut text = format!(
        "{:<14} {:>12} {:>10} {:>7} {:>13} {:>6}\n",
        "program", "instructions", "verified", "states", "machine code", "stack"
    );
    for c in costs {
        text.push_str(&format!(
            "{:<14} {:>12} {:>10} {:>7} {:>13} {:>6}\n",
            c.name, c.instructions, c.verified, c.states, c.machine_code, c.stack
        ));
    }
    text
}

/// Checks the budgets: what is recorded per program, half of the verifier's limit, the whole stack.
///
/// # Errors
/// Naming the program that needs more.
pub fn check(costs: &[Cost]) -> Result<()> {
    for c in costs {
        ensure!(
            c.verified <= BUDGET,
            "{}: the verifier walks {} instructions; the budget is {BUDGET}",
            c.name,
            c.verified
        );
        let recorded = RECORDED.iter().find(|(name, _)| *name == c.name).map(|(_, n)| *n);
        let recorded = recorded.with_context(|| format!("{}: no budget is recorded", c.name))?;
        ensure!(
            c.verified <= recorded,
            "{}: the verifier walks {} instructions; the recorded budget is {recorded}",
            c.name,
            c.verified
        );
        ensure!(c.stack <= STACK_LIMIT, "{}: {} bytes of stack; the limit is {STACK_LIMIT}", c.name, c.stack);
    }
    Ok(())
}

/// A function of the object: its frame and what it calls.
#[derive(Debug, Default)]
struct Frame {
    bytes: u32,
    calls: Vec<(usize, u64)>,
}

/// Frames by (section, offset), programs by name.
struct Stacks {
    frames: BTreeMap<(usize, u64), Frame>,
    programs: BTreeMap<String, (usize, u64)>,
}

impl Stacks {
    fn of(elf: &[u8]) -> Result<Self> {
        let file = object::File::parse(elf).context("parsing the BPF object")?;
        let mut stacks = Self { frames: BTreeMap::new(), programs: BTreeMap::new() };
        for symbol in file.symbols().filter(|s| s.kind() == SymbolKind::Text && s.size() > 0) {
            let Some(section) = symbol.section_index() else { continue };
            let data = file.section_by_index(section)?.data()?;
            let (start, size) = (symbol.address(), symbol.size());
            let code = data
                .get(start as usize..(start + size) as usize)
                .context("a function ends beyond its section")?;
            let mut frame = Frame { bytes: frame_bytes(code), calls: Vec::new() };
            let mut targets = BTreeMap::new();
            for (at, relocation) in file.section_by_index(section)?.relocations() {
                let RelocationTarget::Symbol(index) = relocation.target() else { continue };
                let target = file.symbol_by_index(index)?;
                targets.insert(at, (target.section_index().map(|i| i.0), target.address(), target.kind()));
            }
            for (n, insn) in code.chunks_exact(8).enumerate() {
                // A call of a function of the object: BPF_JMP | BPF_CALL with BPF_PSEUDO_CALL as source.
                if insn[0] != 0x85 || insn[1] >> 4 != 1 {
                    continue;
                }
                let at = start + n as u64 * 8;
                let imm = i64::from(i32::from_le_bytes([insn[4], insn[5], insn[6], insn[7]]));
                let called = match targets.get(&at) {
                    Some((Some(s), _, SymbolKind::Section)) => (*s, ((imm + 1) * 8) as u64),
                    Some((Some(s), address, _)) => (*s, *address),
                    _ => (section.0, (at as i64 + (imm + 1) * 8) as u64),
                };
                frame.calls.push(called);
            }
            stacks.frames.insert((section.0, start), frame);
            stacks.programs.insert(symbol.name()?.to_owned(), (section.0, start));
        }
        Ok(stacks)
    }

    fn of_program(&self, name: &str) -> Result<u32> {
        let at = *self.programs.get(name).with_context(|| format!("no function {name} in the object"))?;
        self.depth(at, 0)
    }

    fn depth(&self, at: (usize, u64), calls: u32) -> Result<u32> {
        ensure!(calls < 8, "more than 8 calls deep");
        let frame = self
            .frames
            .get(&at)
            .with_context(|| format!("a call leads to {at:?}, where no function begins"))?;
        // The kernel rounds each frame up to 16 bytes.
        let own = frame.bytes.max(1).next_multiple_of(16);
        let deepest =
            frame.calls.iter().map(|c| self.depth(*c, calls + 1)).try_fold(0, |a, b| b.map(|b| a.max(b)))?;
        Ok(own + deepest)
    }
}

/// How far below the frame pointer a function reaches.
fn frame_bytes(code: &[u8]) -> u32 {
    let mut lowest = 0i32;
    // Registers that hold the frame pointer.
    let mut copies = [false; 16];
    for insn in code.chunks_exact(8) {
        let (op, dst, src) = (insn[0], usize::from(insn[1] & 15), usize::from(insn[1] >> 4));
        let off = i32::from(i16::from_le_bytes([insn[2], insn[3]]));
        let imm = i32::from_le_bytes([insn[4], insn[5], insn[6], insn[7]]);
        match op & 7 {
            1 if src == 10 => lowest = lowest.min(off),
            2 | 3 if dst == 10 => lowest = lowest.min(off),
            // rX += imm
            7 if op == 0x07 && copies[dst] => lowest = lowest.min(imm),
            _ => {}
        }
        if matches!(op & 7, 1 | 4 | 7) {
            copies[dst] = op == 0xbf && src == 10;
        }
    }
    lowest.unsigned_abs()
}
