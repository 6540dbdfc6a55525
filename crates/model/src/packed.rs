//! A sorted map for few entries: one allocation that is as large as they are. A tree's node has room for eleven, which is most of the
//! memory of ten thousand services with two backends each.

use std::borrow::Borrow;
use std::fmt;

/// See the module's comment. Looks entries up in logarithmic time and adds one in linear time.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackedMap<K, V> {
    /// Keys ascend.
    entries: Vec<(K, V)>,
}

impl<K, V> PackedMap<K, V> {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { entries: Vec::new() }
    }

    /// How many entries there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries, by key.
    pub fn iter(&self) -> Iter<'_, K, V> {
        self.entries.iter().map(|(key, value)| (key, value))
    }

    /// All keys, ascending.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.entries.iter().map(|(key, _)| key)
    }

    /// All values, by key.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.iter().map(|(_, value)| value)
    }

    /// The same, to change.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.entries.iter_mut().map(|(_, value)| value)
    }
}

impl<K: Ord, V> PackedMap<K, V> {
    fn find<Q: Ord + ?Sized>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
    {
        self.entries.binary_search_by(|(k, _)| k.borrow().cmp(key))
    }

    /// A key's value.
    #[must_use]
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let at = self.find(key).ok()?;
        self.entries.get(at).map(|(_, value)| value)
    }

    /// Whether a key is there.
    #[must_use]
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_ok()
    }

    /// Sets a key's value; returns the one it had.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(&key) {
            Ok(at) => self.entries.get_mut(at).map(|(_, held)| std::mem::replace(held, value)),
            Err(at) => {
                self.entries.reserve_exact(1);
                self.entries.insert(at, (key, value));
                None
            }
        }
    }

    /// A key's value; where it has none, this one.
    pub fn or_insert_with(&mut self, key: K, value: impl FnOnce() -> V) -> &mut V {
        let at = match self.find(&key) {
            Ok(at) => at,
            Err(at) => {
                self.entries.reserve_exact(1);
                self.entries.insert(at, (key, value()));
                at
            }
        };
        &mut self.entries[at].1
    }

    /// Takes a key out; returns the value it had.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let at = self.find(key).ok()?;
        let (_, value) = self.entries.remove(at);
        self.entries.shrink_to_fit();
        Some(value)
    }
}

impl<K, V> Default for PackedMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for PackedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// Of two entries with one key the last stays, as in the maps of the standard library.
impl<K: Ord, V> FromIterator<(K, V)> for PackedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(iter: I) -> Self {
        let mut entries: Vec<(K, V)> = iter.into_iter().collect();
        // Stable: of equal keys the last one is last.
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        entries.dedup_by(|later, first| {
            let same = later.0 == first.0;
            if same {
                std::mem::swap(later, first);
            }
            same
        });
        entries.shrink_to_fit();
        Self { entries }
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for PackedMap<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

/// Entries by key.
type Iter<'a, K, V> = std::iter::Map<std::slice::Iter<'a, (K, V)>, fn(&'a (K, V)) -> (&'a K, &'a V)>;

impl<'a, K, V> IntoIterator for &'a PackedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K, V> IntoIterator for PackedMap<K, V> {
    type Item = (K, V);
    type IntoIter = std::vec::IntoIter<(K, V)>;
    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u8, u8),
        Or(u8, u8),
        Remove(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = || 0u8..12;
        prop_oneof![
            (key(), any::<u8>()).prop_map(|(k, v)| Step::Insert(k, v)),
            (key(), any::<u8>()).prop_map(|(k, v)| Step::Or(k, v)),
            key().prop_map(Step::Remove),
        ]
    }

    proptest! {
        #[test]
        fn it_is_a_sorted_map(steps in proptest::collection::vec(step(), 0..60)) {
            let (mut packed, mut tree) = (PackedMap::new(), BTreeMap::new());
            for step in steps {
                match step {
                    Step::Insert(k, v) => prop_assert_eq!(packed.insert(k, v), tree.insert(k, v)),
                    Step::Or(k, v) => {
                        prop_assert_eq!(*packed.or_insert_with(k, || v), *tree.entry(k).or_insert(v));
                    }
                    Step::Remove(k) => prop_assert_eq!(packed.remove(&k), tree.remove(&k)),
                }
                prop_assert!(packed.iter().eq(tree.iter()));
                prop_assert_eq!((packed.len(), packed.is_empty()), (tree.len(), tree.is_empty()));
            }
            for k in 0..12 {
                prop_assert_eq!(packed.get(&k), tree.get(&k));
                prop_assert_eq!(packed.contains_key(&k), tree.contains_key(&k));
            }
        }

        #[test]
        fn of_entries_with_one_key_the_last_stays(entries in proptest::collection::vec((0u8..6, any::<u8>()), 0..30)) {
            let packed: PackedMap<u8, u8> = entries.iter().copied().collect();
            let tree: BTreeMap<u8, u8> = entries.into_iter().collect();
            prop_assert!(packed.iter().eq(tree.iter()));
        }
    }
}
