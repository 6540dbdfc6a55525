//! The 16 bits behind the protocol in a policy key: ranges to prefixes, and the trie that finds the winner of every prefix.

use crate::PolicyEntries;
use crate::lookup::masked;
use flowloom_bpf_abi::{PolicyKey, PolicyValue};

/// Tiers that have rules: platform, tenant, baseline.
pub(crate) const TIERS: usize = 3;

/// A rule that matches somewhere. The greater `rank` wins, then the earlier rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pick {
    pub(crate) rank: u64,
    pub(crate) rule: u32,
}

impl Pick {
    fn beats(self, other: Self) -> bool {
        (self.rank, std::cmp::Reverse(self.rule)) > (other.rank, std::cmp::Reverse(other.rule))
    }
}

/// The best pick of each tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Best([Option<Pick>; TIERS]);

impl Best {
    pub(crate) fn offer(&mut self, tier: usize, pick: Pick) {
        if let Some(slot) = self.0.get_mut(tier)
            && slot.is_none_or(|held| pick.beats(held))
        {
            *slot = Some(pick);
        }
    }

    pub(crate) fn with(mut self, other: &Self) -> Self {
        for (tier, pick) in other.0.iter().enumerate() {
            if let Some(pick) = pick {
                self.offer(tier, *pick);
            }
        }
        self
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Picks in the order of tiers.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = Pick> {
        self.0.iter().flatten().copied()
    }
}

/// A block of ports: the first `len` bits of `start`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    pub(crate) start: u16,
    pub(crate) len: u32,
}

/// The fewest blocks that make up an inclusive range.
pub(crate) fn blocks(from: u16, to: u16) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut at, end) = (u32::from(from), u32::from(to) + 1);
    while at < end {
        // Largest block that starts here: as aligned as the start, no longer than what is left.
        let aligned = if at == 0 { 16 } else { at.trailing_zeros().min(16) };
        let fits = (end - at).ilog2();
        let bits = aligned.min(fits);
        blocks.push(Block { start: at as u16, len: 16 - bits });
        at += 1 << bits;
    }
    blocks
}

/// Binary trie over the 16 bits; node 0 is the root.
#[derive(Clone, Debug)]
pub(crate) struct Trie(Vec<Node>);

#[derive(Clone, Debug, Default)]
struct Node {
    best: Best,
    /// 0 = none (the root is nobody's child).
    children: [u32; 2],
}

impl Default for Trie {
    fn default() -> Self {
        Self(vec![Node::default()])
    }
}

impl Trie {
    pub(crate) fn insert(&mut self, block: Block, tier: usize, pick: Pick) {
        let mut at = 0usize;
        for bit in 0..block.len {
            let side = usize::from(block.start >> (15 - bit) & 1 == 1);
            let next = self.0[at].children[side];
            at = if next == 0 {
                let fresh = self.0.len();
                self.0.push(Node::default());
                self.0[at].children[side] = fresh as u32;
                fresh
            } else {
                next as usize
            };
        }
        self.0[at].best.offer(tier, pick);
    }

    fn node(&self, at: Option<u32>) -> Option<&Node> {
        at.and_then(|at| self.0.get(at as usize))
    }
}

/// Answers for every port, as a tree whose leaves cover blocks.
pub(crate) struct Answers {
    /// Values that may stand for the whole block without an entry more than needed; empty = some port below has no answer.
    candidates: Vec<PolicyValue>,
    children: Option<Box<[Answers; 2]>>,
}

/// Two tries walked together: `own` decides where there is something to answer, `under` is looked at below that only when `deep`.
pub(crate) struct Walk<'a, F> {
    pub(crate) own: &'a Trie,
    pub(crate) under: Option<&'a Trie>,
    pub(crate) deep: bool,
    /// The answer of a block from the best picks of both; none = no entry.
    pub(crate) answer: F,
}

impl<F: Fn(&Best, &Best) -> Option<PolicyValue>> Walk<'_, F> {
    /// Answers for all ports, given what matches every port of the protocol.
    pub(crate) fn run(&self, own: Best, under: Best) -> Answers {
        self.at(Some(0), self.under.map(|_| 0), own, under, 0)
    }

    fn at(&self, own_at: Option<u32>, under_at: Option<u32>, own: Best, under: Best, depth: u32) -> Answers {
        let own_node = self.own.node(own_at);
        let under_node = self.under.and_then(|t| t.node(under_at));
        let own = own_node.map_or(own, |n| own.with(&n.best));
        let under = under_node.map_or(under, |n| under.with(&n.best));
        let child = |node: Option<&Node>, side: usize| node.map(|n| n.children[side]).filter(|c| *c != 0);
        let splits = |node: Option<&Node>| child(node, 0).is_some() || child(node, 1).is_some();
        if depth == 16 || !(splits(own_node) || (self.deep && splits(under_node))) {
            return Answers { candidates: (self.answer)(&own, &under).into_iter().collect(), children: None };
        }
        let side = |s: usize| self.at(child(own_node, s), child(under_node, s), own, under, depth + 1);
        Answers::join(side(0), side(1))
    }
}

impl Answers {
    fn join(left: Self, right: Self) -> Self {
        if left.children.is_none() && right.children.is_none() && left.candidates == right.candidates {
            return left;
        }
        let candidates = if left.candidates.is_empty() || right.candidates.is_empty() {
            Vec::new()
        } else {
            let common: Vec<_> = left
                .candidates
                .iter()
                .filter(|v| right.candidates.binary_search(v).is_ok())
                .copied()
                .collect();
            if common.is_empty() {
                let mut all = [left.candidates.as_slice(), &right.candidates].concat();
                all.sort_unstable();
                all.dedup();
                all
            } else {
                common
            }
        };
        Self { candidates, children: Some(Box::new([left, right])) }
    }

    /// Writes the fewest entries whose longest match gives these answers, where `inherited` is what a shorter prefix gives.
    pub(crate) fn write(
        &self,
        identity: u32,
        protocol: u8,
        inherited: Option<PolicyValue>,
        entries: &mut PolicyEntries,
    ) {
        self.write_at(identity, protocol, Block { start: 0, len: 0 }, inherited, entries);
    }

    fn write_at(
        &self,
        identity: u32,
        protocol: u8,
        block: Block,
        mut inherited: Option<PolicyValue>,
        entries: &mut PolicyEntries,
    ) {
        if let Some(first) = self.candidates.first()
            && inherited.is_none_or(|v| self.candidates.binary_search(&v).is_err())
            && let Some(key) = masked(identity, protocol, block.start, PolicyKey::PROTOCOL_BITS + block.len)
        {
            entries.insert(key, *first);
            inherited = Some(*first);
        }
        if let Some(children) = &self.children {
            for (side, child) in children.iter().enumerate() {
                let start = block.start | ((side as u16) << (15 - block.len));
                child.write_at(identity, protocol, Block { start, len: block.len + 1 }, inherited, entries);
            }
        }
    }
}
